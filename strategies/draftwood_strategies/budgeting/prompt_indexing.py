"""How much of prompts is indexed in one step of the engine: all its sequences wait meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

MOST_INDEXED = 2048
"""Tokens: 0.2 to 0.7 ms, and 1.8 ms for jacobi (docs/decisions, "Prompts are indexed in pieces"). Otherwise not
tuned."""


@dataclass(slots=True)
class IndexingBudget:
    """Of one step.

    Attributes:
        left: tokens that drafters may still index in it.
    """

    left: int = MOST_INDEXED
