"""What the memory's tests share: answers to learn from, replicas without threads, and real servers."""

from __future__ import annotations

import secrets
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass


@dataclass
class Answer:
    """What a request wrote."""

    output: SequenceOf[int]


def numbers(count: int, start: int = 0) -> list[int]:
    """Tokens that tell where they come from."""
    return [(start + i) % 30_000 for i in range(count)]


def random_source() -> str:
    return secrets.token_hex(8)
