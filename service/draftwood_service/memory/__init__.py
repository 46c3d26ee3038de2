"""Tenants' memories: what each tenant's requests generated, learned by its own drafting strategies, kept in a store.

A memory belongs to one tenant and one model. Nothing is shared between tenants.
"""
