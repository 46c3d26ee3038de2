"""`draftwood bench speed`: one stream, against transformers."""
