"""How much to draft, by what drafts gain and what steps cost. For any engine, which measures the times of its steps."""
