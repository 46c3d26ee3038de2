"""Drafts for engines that are not ours: what their plug-ins have in common. Knows no engine, only rows of token ids."""
