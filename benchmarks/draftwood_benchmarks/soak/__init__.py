"""`draftwood bench soak`: mixed traffic for a long time."""
