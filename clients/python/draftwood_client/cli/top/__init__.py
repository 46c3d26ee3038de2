"""`draftwood top`: a live view of one or several servers."""
