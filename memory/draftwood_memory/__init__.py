"""What tenants taught the drafts, shared by replicas through Redis."""
