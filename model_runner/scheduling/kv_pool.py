"""Allocates the KV memory: to live sequences first, and to retained prefixes with what is left. Holds no torch.

A sequence gets a region for what it needs now and a little growth, not for the longest output that it may write; when
it outgrows the region, its rows move to a larger one. On two CPU cores, moving 400 rows of the bundled model takes
0.07 ms, a fortieth of a step, once in a few hundred tokens.
"""

from __future__ import annotations

from model_runner.errors import KVAllocationError
from model_runner.runners.base import KVStore
from model_runner.scheduling.prefix_cache import PREFIX_BLOCK, CachedRegion, PrefixCache
from model_runner.sequence import Sequence
from strategies.draft import Int32Array

GROWTH = 64
"""Tokens that a sequence can write at least before its region must grow. Not tuned: growing is cheap, see above."""

_SMALLEST = 128


def size_class(tokens: int) -> int:
    """The smallest of 128, 192, 256, 384, 512, 768, ... that is no less. Few sizes let freed regions be reused."""
    size = _SMALLEST
    while size < tokens:
        size += size // 2 if size & (size - 1) == 0 else size // 3
    return size


class KVPool:
    """Accounts for every region, of live sequences and of retained prefixes, within one capacity.

    Args:
        store: allocates the regions.
        capacity: tokens over all regions; at least `largest`.
        largest: the most tokens that any sequence needs, its draft included.
        prefix_cache: retain the regions of ended sequences, and begin new sequences with the longest cached prefix.
    """

    def __init__(self, store: KVStore, capacity: int, largest: int, prefix_cache: bool = True) -> None:
        assert capacity >= largest
        self.capacity = capacity
        self.prefix_cache = prefix_cache
        self._store = store
        self._largest = largest
        self._held: dict[Sequence, CachedRegion] = {}
        self._prefixes = PrefixCache()
        self._live_tokens = 0
        self._retained_tokens = 0

    @property
    def allocated_tokens(self) -> int:
        """Tokens over all regions that are allocated."""
        return self._live_tokens + self._retained_tokens

    @property
    def live_tokens(self) -> int:
        """Tokens over the regions of live sequences."""
        return self._live_tokens

    def region(self, sequence: Sequence) -> int:
        """The number of the KV region of a live sequence."""
        return self._held[sequence].number

    def size(self, sequence: Sequence) -> int:
        """Tokens that the region of a live sequence can hold."""
        return self._held[sequence].capacity

    def cached(self, sequence: Sequence) -> int:
        """How many of the tokens of a waiting sequence are cached."""
        return self._find(sequence)[1]

    def open(self, sequence: Sequence) -> bool:
        """Gives a sequence its region, and in it the longest cached prefix of its tokens.

        Sets `committed`. At least the last token is left to compute, because its logits choose the next one.
        Returns False, and does nothing, while live sequences hold too much or the device has no memory.
        """
        size = self._need(sequence)
        if self._live_tokens + size > self.capacity:
            return False
        source, shared = self._find(sequence)
        if source is not None and self._can_take_over(source, shared, size):
            region = CachedRegion(sequence.request.tenant, source.number, source.capacity)
            self._prefixes.forget(source)
            self._retained_tokens -= source.capacity
        else:
            if source is not None:
                self._prefixes.touch(source)
            number = self._allocate(size)
            if number is None:
                return False
            region = CachedRegion(sequence.request.tenant, number, size)
            # The source may have been evicted to make room.
            shared = 0 if source is None else min(shared, source.tokens.size)
            if source is not None and shared:
                self._store.copy(source.number, number, shared)
        self._live_tokens += region.capacity
        self._held[sequence] = region
        sequence.committed = shared
        self.record(sequence)
        return True

    def record(self, sequence: Sequence) -> None:
        """Makes what is committed of the prompt of a live sequence findable. Cheap if there is nothing new."""
        region, prompt = self._held[sequence], sequence.request.prompt
        known = min(sequence.committed, prompt.size)
        if self.prefix_cache and known > region.tokens.size:
            self._record(region, prompt[:known])

    def is_short(self, sequence: Sequence) -> bool:
        """Whether the next step of the sequence may need more than its region holds."""
        return sequence.length + sequence.request.max_draft_nodes > self._held[sequence].capacity

    def shortfall(self, sequence: Sequence) -> int:
        """How many tokens live sequences must free before this one can grow; 0 or less for none."""
        return self._live_tokens + self._need(sequence) - self.capacity

    def grow(self, sequence: Sequence) -> bool:
        """Moves a sequence, whose shortfall must be none, to a larger region.

        Returns False, and does nothing, if the device has no memory for it.
        """
        region, size = self._held[sequence], self._need(sequence)
        number = self._allocate(size)
        if number is None:
            return False
        self._store.copy(region.number, number, sequence.committed)
        self._store.free(region.number)
        self._live_tokens += size - region.capacity
        region.number, region.capacity = number, size
        return True

    def close(self, sequence: Sequence, keep: bool = True) -> None:
        """Takes back the region of a sequence; retains it as a cached prefix if `keep`: its rows are valid."""
        region = self._held.pop(sequence)
        self._live_tokens -= region.capacity
        if keep and self.prefix_cache:
            self._record(region, sequence.tokens(0, sequence.committed))
            if self._prefixes.worth_retaining(region):
                self._prefixes.retain(region)
                self._retained_tokens += region.capacity
                return
        self._prefixes.forget(region)
        self._store.free(region.number)

    def check(self, live: list[Sequence]) -> None:
        """Asserts that live sequences alone hold regions, that the sums are right, and within the capacity."""
        retained = self._prefixes.retained
        regions = [*self._held.values(), *retained]
        assert self._held.keys() == set(live)
        assert self._live_tokens == sum(region.capacity for region in self._held.values())
        assert self._retained_tokens == sum(region.capacity for region in retained)
        assert self.allocated_tokens == self._store.allocated_tokens <= self.capacity
        assert self.prefix_cache or not retained
        assert len({region.number for region in regions}) == len(regions)
        assert all(sequence.committed <= self.size(sequence) for sequence in self._held)
        self._prefixes.check(list(self._held.values()))

    def _need(self, sequence: Sequence) -> int:
        """The size of the region that the sequence should have now."""
        tokens = min(sequence.length + GROWTH, sequence.longest) + sequence.request.max_draft_nodes
        return min(size_class(tokens), self._largest)

    def _find(self, sequence: Sequence) -> tuple[CachedRegion | None, int]:
        if not self.prefix_cache:
            return None, 0
        request = sequence.request
        tokens = request.prompt if not sequence.output else sequence.tokens(0, sequence.length)
        source, shared = self._prefixes.find(request.tenant, tokens)
        return source, min(shared, sequence.length - 1)

    def _can_take_over(self, source: CachedRegion, shared: int, size: int) -> bool:
        """Whether a retained region can become the region of a sequence: large enough, and no cached block is lost."""
        nothing_lost = shared >= PREFIX_BLOCK * len(source.hashes)
        return nothing_lost and source.capacity >= size and self._prefixes.is_retained(source)

    def _record(self, region: CachedRegion, tokens: Int32Array) -> None:
        for redundant in self._prefixes.record(region, tokens):
            self._evict(redundant)

    def _allocate(self, size: int) -> int | None:
        """A new region; evicts the least recently used prefixes if need be. None if the device has no memory."""
        while self.allocated_tokens + size > self.capacity:
            self._evict(self._prefixes.oldest())
        while True:
            try:
                return self._store.allocate(size)
            except KVAllocationError:
                if not self._retained_tokens:
                    return None
                self._evict(self._prefixes.oldest())

    def _evict(self, region: CachedRegion) -> None:
        self._prefixes.forget(region)
        self._retained_tokens -= region.capacity
        self._store.free(region.number)
