"""Administration of tenants and experiments."""
