"""What a strategy is: structural protocols and the feedback that drafters get.

A third party implements these without importing them; see `registry` for how one is found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from draftwood_strategies.draft import DraftTree
from draftwood_strategies.native import Int32Array


@dataclass(frozen=True, slots=True)
class Feedback:
    """The model's predictions at every node of a verified tree, at rejected ones too.

    Node 0 is the sequence's last committed token; node i + 1 is node i of the draft tree.

    Attributes:
        tokens: int32[m], the token at each node.
        parents: int32[m], each node's parent in this numbering; -1 for node 0.
        predictions: int32[m], the model's most probable token after each node.
        top_tokens: int32[m, k], its k most probable ones, best first, for a strategy with `top_k` above 0; None
            otherwise.
    """

    tokens: Int32Array
    parents: Int32Array
    predictions: Int32Array
    top_tokens: Int32Array | None = None


@runtime_checkable
class Drafter(Protocol):
    """Drafts for one live sequence. Called from one thread only."""

    def propose(self, budget: int) -> DraftTree:
        """A tree of at most `budget` nodes (budget >= 1); an empty one if there is nothing to draft."""

    def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
        """The sequence grew by `accepted`, int32[a] with a >= 1: draft tokens and the model's own last one.

        `feedback` belongs to the tree of the latest step, also when that tree was empty or pruned; None where
        `accepted` was written in steps without a draft, since drafts had not paid.
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
        """By the name of the strategy that raised the node's probability most."""

    def limit_tokens(self, vocab_size: int) -> None:
        """Called before the first draft: a part that drafts a token of `vocab_size` or above is at fault."""

    def drop_slowest(self) -> str:
        """Drafts without the part that took longest so far; returns its name, "" where no part can be spared."""


@runtime_checkable
class Strategy(Protocol):
    """Drafts for one tenant: holds what its sequences share, and starts a drafter for each.

    `start` and all its drafters are called from one thread.
    """

    @property
    def top_k(self) -> int:
        """How many of the model's most probable tokens its drafters get at each node; 0 for none."""

    def start(self, prompt: Int32Array) -> Drafter:
        """A drafter for a sequence that begins with `prompt`, int32[p] with p >= 1."""


@runtime_checkable
class Readable(Protocol):
    """What a strategy offers besides for requests that nothing may be learned from."""

    def start_reading(self, prompt: Int32Array) -> Drafter:
        """As `Strategy.start`, of a drafter that changes nothing of what sequences share."""


class Successors(Protocol):
    """The model's most probable next tokens by context, as `successors.SuccessorTable` keeps them."""

    @property
    def rows(self) -> Int32Array:
        """int32[r, COLUMNS], the hash table as `draftwood_strategies.successors` lays it out; read at every draft."""

    @property
    def nbytes(self) -> int:
        """Its memory, in bytes."""

    def note(self, tail: Int32Array, tokens: Int32Array, parents: Int32Array, top_tokens: Int32Array) -> None:
        """Learns from a verified tree, after each step.

        Args:
            tail: int32[ORDERS], the last tokens of the sequence, the newest last; -1 before its first one.
            tokens, parents, top_tokens: as in `Feedback`, empty where there was none.
        """


@runtime_checkable
class SuccessorSource(Protocol):
    """What a strategy offers besides to be a hybrid's successor table, looked up at every node of the mixed tree.

    Its drafters are not started there. Its `top_k` is at least `draftwood_strategies.successors.WIDTH`.
    """

    @property
    def successors(self) -> Successors:
        """The tenant's table, the same object for the strategy's whole life."""
