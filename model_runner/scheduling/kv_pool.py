"""Who holds how much of the KV memory: live sequences first, prefixes that may be wanted again with what is left.

Holds no torch: slabs come from a store, and all that happens to one is that rows are copied into it. A sequence gets a
slab for what it needs now and a little growth, not for the longest answer that it may write; when it outgrows the
slab, its rows move to a larger one. On two CPU cores, moving 400 rows of the bundled model takes 0.07 ms, a fortieth of
a step, once in a few hundred tokens.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from model_runner.scheduling.prefix_cache import BLOCK, KVSlab, PrefixCache, Region
from model_runner.sequence import Sequence
from strategies.draft import Int32Array

GROWTH = 64
"""Tokens that a sequence can write at least before its slab must grow."""

_SMALLEST = 128

S = TypeVar("S", bound=KVSlab)


class SlabStore(Protocol[S]):
    """Where slabs come from; `kv_cache.KVCache`."""

    def take(self, tokens: int) -> S: ...
    def give_back(self, slab: S) -> None: ...


def size_class(tokens: int) -> int:
    """The smallest of 128, 192, 256, 384, 512, 768, ... that is no less: few sizes, so that a freed slab fits again."""
    size = _SMALLEST
    while size < tokens:
        size += size // 2 if size & (size - 1) == 0 else size // 3
    return size


class KVPool(Generic[S]):
    """Accounts for every slab, of live sequences and of retained prefixes, within one capacity.

    Args:
        store: where slabs come from.
        capacity: tokens over all slabs; at least `largest`.
        largest: the most tokens that any sequence needs, its draft included.
        prefix_cache: retain ended sequences' slabs, and begin new sequences with the longest prefix that is here.
    """

    def __init__(self, store: SlabStore[S], capacity: int, largest: int, prefix_cache: bool = True) -> None:
        assert capacity >= largest
        self.capacity = capacity
        self.prefix_cache = prefix_cache
        self._store = store
        self._largest = largest
        self._held: dict[Sequence, Region[S]] = {}
        self._prefixes: PrefixCache[S] = PrefixCache()
        self._live_tokens = 0
        self._retained_tokens = 0

    @property
    def tokens_out(self) -> int:
        """Tokens over all slabs that are taken from the store."""
        return self._live_tokens + self._retained_tokens

    @property
    def live_tokens(self) -> int:
        """Tokens over the slabs of live sequences."""
        return self._live_tokens

    def slab(self, sequence: Sequence) -> S:
        return self._held[sequence].slab

    def size(self, sequence: Sequence) -> int:
        """Tokens that a live sequence's slab holds."""
        return self._held[sequence].slab.capacity

    def cached(self, sequence: Sequence) -> int:
        """How many of its tokens a waiting sequence would find here."""
        return self._find(sequence)[1]

    def open(self, sequence: Sequence) -> bool:
        """Gives a sequence its slab, and in it the longest prefix of its tokens that is here.

        Sets `committed`. At least the last token is left to compute, for it is its logits that write the next one.
        Returns False, and does nothing, while live sequences hold too much.
        """
        size = self._need(sequence)
        if self._live_tokens + size > self.capacity:
            return False
        source, shared = self._find(sequence)
        if source is not None and self._can_take_over(source, shared, size):
            slab = source.slab
            self._prefixes.forget(source)
            self._retained_tokens -= slab.capacity
        else:
            if source is not None:
                self._prefixes.touch(source)
            slab = self._take(size)
            # The source itself may have had to make room.
            shared = 0 if source is None else min(shared, source.tokens.size)
            if source is not None and shared:
                slab.copy_rows(source.slab, shared)
        self._live_tokens += slab.capacity
        self._held[sequence] = Region(sequence.tenant, slab)
        sequence.committed = shared
        self.record(sequence)
        return True

    def record(self, sequence: Sequence) -> None:
        """Lets others find what is committed of a live sequence's prompt. Cheap where there is nothing new."""
        region = self._held[sequence]
        known = min(sequence.committed, sequence.prompt.size)
        if self.prefix_cache and known > region.tokens.size:
            self._record(region, sequence.prompt[:known])

    def is_short(self, sequence: Sequence) -> bool:
        """Whether the sequence's next step may need more than its slab holds."""
        return sequence.length + sequence.max_draft_nodes > self._held[sequence].slab.capacity

    def shortfall(self, sequence: Sequence) -> int:
        """How many tokens live sequences must give up before this one can grow; none where it is 0 or less."""
        return self._live_tokens + self._need(sequence) - self.capacity

    def grow(self, sequence: Sequence) -> None:
        """Moves a sequence, whose shortfall must be none, to a larger slab."""
        region = self._held[sequence]
        old, region.slab = region.slab, self._take(self._need(sequence))
        region.slab.copy_rows(old, sequence.committed)
        self._live_tokens += region.slab.capacity - old.capacity
        self._store.give_back(old)

    def close(self, sequence: Sequence, keep: bool = True) -> None:
        """Takes a sequence's slab; retains it as a prefix for others where `keep` says that its rows are sound."""
        region = self._held.pop(sequence)
        self._live_tokens -= region.slab.capacity
        if keep and self.prefix_cache:
            self._record(region, sequence.tokens(0, sequence.committed))
            if self._prefixes.worth_retaining(region):
                self._prefixes.retain(region)
                self._retained_tokens += region.slab.capacity
                return
        self._prefixes.forget(region)
        self._store.give_back(region.slab)

    def check(self, live: list[Sequence]) -> None:
        """Asserts that live sequences alone hold slabs, that the sums are right, and within the capacity."""
        retained = self._prefixes.retained
        assert self._held.keys() == set(live)
        assert self._live_tokens == sum(region.slab.capacity for region in self._held.values())
        assert self._retained_tokens == sum(region.slab.capacity for region in retained)
        assert self.tokens_out <= self.capacity
        assert self.prefix_cache or not retained
        assert len({id(region.slab) for region in [*self._held.values(), *retained]}) == len(self._held) + len(retained)
        assert all(sequence.committed <= self.size(sequence) for sequence in self._held)
        self._prefixes.check(list(self._held.values()))

    def _need(self, sequence: Sequence) -> int:
        """The slab that the sequence should have now."""
        longest = int(sequence.prompt.size) + sequence.stop.max_tokens
        tokens = min(sequence.length + GROWTH, longest) + sequence.max_draft_nodes
        return min(size_class(tokens), self._largest)

    def _find(self, sequence: Sequence) -> tuple[Region[S] | None, int]:
        if not self.prefix_cache:
            return None, 0
        tokens = sequence.prompt if not sequence.output else sequence.tokens(0, sequence.length)
        source, shared = self._prefixes.find(sequence.tenant, tokens)
        return source, min(shared, sequence.length - 1)

    def _can_take_over(self, source: Region[S], shared: int, size: int) -> bool:
        """Whether a retained slab can become a sequence's own: it is large enough, and no block of it is lost."""
        nothing_lost = shared >= BLOCK * len(source.hashes)
        return nothing_lost and source.slab.capacity >= size and self._prefixes.is_retained(source)

    def _record(self, region: Region[S], tokens: Int32Array) -> None:
        for redundant in self._prefixes.record(region, tokens):
            self._evict(redundant)

    def _take(self, size: int) -> S:
        """A slab from the store, in place of the least recently used prefixes if need be."""
        while self.tokens_out + size > self.capacity:
            self._evict(self._prefixes.oldest())
        return self._store.take(size)

    def _evict(self, region: Region[S]) -> None:
        self._prefixes.forget(region)
        self._retained_tokens -= region.slab.capacity
        self._store.give_back(region.slab)
