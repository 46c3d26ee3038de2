"""Tenants and experiments in the process of an engine that is not ours: what its plug-ins have in common."""
