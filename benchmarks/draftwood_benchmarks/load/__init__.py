"""`draftwood bench load`: many clients of one service."""
