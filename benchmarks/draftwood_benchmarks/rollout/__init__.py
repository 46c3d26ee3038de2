"""`draftwood bench rollout`: replicas that are replaced one after the other, under load."""
