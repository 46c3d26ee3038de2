"""How much to draft, and the guard around strategies: one engine of drafts for all hosts."""
