"""`draftwood bench share`: a memory that replicas share."""
