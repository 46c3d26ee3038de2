"""The pages of one live sequence, and the window behind which it needs none. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from draftwood_model_runner.scheduling.prefix_cache import CachedPrefix
from draftwood_strategies.draft import Int32Array

GROWTH = 64
"""Tokens that a sequence can write at least before it needs further pages. Taking pages is cheap."""
NULL_PAGE = -1
"""In a page table: the page was given up, since no token attends to its entries any more."""


@dataclass(eq=False, slots=True)
class PageTable:
    """The pages of a live sequence.

    Attributes:
        pages: int32[p]; token i of the sequence is in row i % page_size of page i // page_size.
        prefix: its blocks, as far as they were hashed.
        recorded: how many of its first pages the prefix cache knows.
        freed: how many of the first pages it gave up; they are `NULL_PAGE`.
        longest: tokens of the sequence up to which its next step fits, with its draft.
    """

    pages: Int32Array
    prefix: CachedPrefix
    recorded: int
    freed: int = 0
    longest: int = 0

    @property
    def held(self) -> Int32Array:
        """int32[h], the pages that it has not given up."""
        return self.pages[self.freed :]


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """The sliding window of a model all of whose layers have one.

    Attributes:
        tokens: the last ones that a token attends to at most, its own included.
        step: tokens of a sequence that a step computes at most, without its draft.
    """

    tokens: int
    step: int

    def needs(self, draft_nodes: int) -> int:
        """Tokens of KV memory, in pages of at most `GROWTH` / 2, with which a sequence of any length can run."""
        return self.tokens + self.step + 2 * GROWTH + draft_nodes
