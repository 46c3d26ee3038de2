"""Draws a real step of the bundled model for `docs/concepts.md`: `python -m tools.step_pictures`."""
