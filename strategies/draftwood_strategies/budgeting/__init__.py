"""How much to draft, by what drafts gain and what steps cost. For any engine: it brings the times of its own steps."""
