"""Configuration of tenants."""
