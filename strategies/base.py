"""What a strategy is: two structural protocols and the feedback that drafters get.

A third party implements these without importing them; see `registry` for how one is found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from strategies.draft import DraftTree, Int32Array


@dataclass(frozen=True, slots=True)
class Feedback:
    """What the model said at every node of a verified tree, at rejected ones too.

    Node 0 is the sequence's last committed token; node i + 1 is node i of the draft tree.

    Attributes:
        tokens: int32[m], the token at each node.
        parents: int32[m], each node's parent in this numbering; -1 for node 0.
        predictions: int32[m], the model's most probable token after each node.
        top_tokens: int32[m, k], its k most probable ones, best first, where the strategy asked for them
            (`Strategy.top_k`); None otherwise.
    """

    tokens: Int32Array
    parents: Int32Array
    predictions: Int32Array
    top_tokens: Int32Array | None = None


@runtime_checkable
class Drafter(Protocol):
    """Drafts for one live sequence. Called from one thread only."""

    def propose(self, budget: int) -> DraftTree:
        """A tree of at most `budget` nodes (budget >= 1); an empty one where it has nothing to say."""

    def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
        """The sequence grew by `accepted`, int32[a] with a >= 1: draft tokens and the model's own last one.

        `feedback` belongs to the tree of the latest step, also when that tree was empty or pruned; None where
        `accepted` was written in steps that no draft was asked for, since drafts had not paid.
        """

    def close(self) -> None:
        """The sequence ended, in whatever way. Called once."""


class SourceCounts(NamedTuple):
    """How many of a strategy's nodes were verified, and how many of them were accepted."""

    verified: int
    accepted: int


@runtime_checkable
class Composite(Protocol):
    """What a drafter that is made of others' offers besides, so that one part's fault costs that part alone."""

    @property
    def by_source(self) -> Mapping[str, SourceCounts]:
        """By the name of the strategy that spoke most for the node."""

    def limit_tokens(self, vocab_size: int) -> None:
        """Told before the first draft: a part that drafts a token of `vocab_size` or above is at fault."""

    def drop_slowest(self) -> str:
        """Drafts without the part that took longest so far; returns its name, "" where no part can be spared."""


@runtime_checkable
class Strategy(Protocol):
    """Drafts for one tenant: holds what its sequences share, and starts a drafter for each.

    `start` and all its drafters are called from one thread.
    """

    @property
    def top_k(self) -> int:
        """How many of the model's most probable tokens its drafters want to see at each node; 0 for none."""

    def start(self, prompt: Int32Array) -> Drafter:
        """A drafter for a sequence that begins with `prompt`, int32[p] with p >= 1."""
