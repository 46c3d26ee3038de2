"""Draws a token from scores: what top-k, top-p and min-p keep, and noise for these tokens alone."""
