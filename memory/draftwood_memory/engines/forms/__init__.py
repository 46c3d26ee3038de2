"""The forms in which engines verify drafts: chains, or trees of one size."""
