"""JSON objects in fields of requests, as schemas and arguments of tools are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

MAX_NESTING = 32
"""Objects and lists in one another. Templates indent tools: 100 KB in 300 levels are 60 MB of prompt."""


def read_object(text: str) -> dict[str, Any]:
    """Raises ValueError, which says what is wrong."""
    try:
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError(f"must be a JSON object, not {type(value).__name__}")
        require_shallow(value)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"has the unpaired surrogate {error.object[error.start]!r}, which is not text") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    return value


def require_shallow(value: object) -> None:
    """Raises ValueError."""
    if any(level > MAX_NESTING for level, _ in _levels(value)):
        raise ValueError(_TOO_DEEP)


def indentation(value: object) -> int:
    """Characters of white space that templates add to JSON, at most."""
    return sum((4 * level + 1) * children for level, children in _levels(value))


_TOO_DEEP = f"is nested too deeply; at most {MAX_NESTING} levels are allowed"


def _levels(value: object) -> Iterator[tuple[int, int]]:
    """Each level of objects and lists, from 1, and the lines in it: items, and brackets that close."""
    level, containers = 0, [value]
    while containers := [one for one in containers if isinstance(one, dict | list)]:
        level += 1
        children = [child for one in containers for child in (one.values() if isinstance(one, dict) else one)]
        yield level, len(children) + len(containers)
        containers = children
