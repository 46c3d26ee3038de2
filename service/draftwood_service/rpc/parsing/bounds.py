"""Bounds on how many items and characters a field of a request has."""

from __future__ import annotations

from draftwood_model_runner.errors import InvalidInputError


def require_at_most(field: str, count: int, most: int, what: str = "items") -> None:
    """Raises InvalidInputError."""
    if count > most:
        raise InvalidInputError(field, None, f"has {count} {what}; at most {most} are allowed")


def require_length(field: str, text: str, most: int) -> None:
    """Raises InvalidInputError for an empty text, and one with more characters."""
    if not 1 <= len(text) <= most:
        raise InvalidInputError(field, None, f"must have 1 to {most} characters; it has {len(text)}")
