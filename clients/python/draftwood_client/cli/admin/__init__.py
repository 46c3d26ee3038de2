"""`draftwood tenant` and `draftwood experiment`."""
