"""Clients of the operators' services, `draftwood.admin.v1`."""
