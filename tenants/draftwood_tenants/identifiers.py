"""Tenants, request ids and arms of experiments, as callers name them: fit for logs, traces and keys."""

from __future__ import annotations

import unicodedata

from draftwood_errors import InvalidInputError

MAX_IDENTIFIER_BYTES = 256


def check_identifier(field: str, given: str) -> str:
    """`given`, if it is valid.

    Raises:
        InvalidInputError: it has more than `MAX_IDENTIFIER_BYTES` bytes of UTF-8, or control characters.
    """
    if len(given.encode()) > MAX_IDENTIFIER_BYTES:
        raise InvalidInputError(field, None, f"must have at most {MAX_IDENTIFIER_BYTES} bytes of UTF-8")
    if any(unicodedata.category(character) == "Cc" for character in given):
        raise InvalidInputError(field, None, "must not contain control characters")
    return given
