"""The pages of one live sequence, and the window behind which it needs none."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from draftwood_model_runner.runners.base import PageStates
from draftwood_model_runner.scheduling.page_pool import PagePool, PrefixCache
from draftwood_model_runner.sequence import CachedPrefix, KVUse, PageTable, Sequence, StateUse
from draftwood_strategies.arrays import Int32Array

GROWTH = 64
"""Tokens that a sequence can write at least before it needs further pages. Taking pages is cheap."""
NULL_PAGE = -1
"""In a page table: the page was given up, since no token attends to its entries any more."""


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


class KVPool:
    """Shares out the pages: to live sequences first, and to prefixes that are kept for reuse with what is left.

    Args:
        pages: how many there are, at least as many as any sequence needs.
        page_size: tokens of a page.
        prefix_cache: keep the pages of ended sequences, and begin new sequences with the longest cached prefix.
        states: of recurrent layers; None for a model without. A prefix ends where one is known, and has no written
            tokens: a runner may compute those otherwise than tokens of a prompt.
        window: None if some layer attends to all earlier tokens.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        prefix_cache: bool = True,
        states: PageStates | None = None,
        window: AttentionWindow | None = None,
    ) -> None:
        assert states is None or window is None
        self.page_size = page_size
        self.window = window
        self.prefix_cache = prefix_cache
        self._states = states
        self._pages = PagePool(pages)
        self._prefixes = PrefixCache(pages)

    @property
    def available(self) -> int:
        """Pages that live sequences do not hold."""
        return self._pages.num_free + self._prefixes.retained

    @property
    def use(self) -> KVUse:
        total, cached = self._pages.references.size, self._prefixes.retained
        return KVUse(total, total - cached - self._pages.num_free, cached)

    @property
    def state_use(self) -> StateUse:
        """Memory of recurrent layers' states; none for a model without."""
        return StateUse() if self._states is None else self._states.use

    def pages(self, sequence: Sequence) -> Int32Array:
        """int32[p], the page table of a live sequence; `NULL_PAGE` for pages behind the window that it gave up."""
        return sequence.kv.pages

    def cached(self, sequence: Sequence) -> int:
        """How many of the tokens of a waiting sequence are cached. Looks at what is new since the last time alone."""
        return self._find(sequence).size * self.page_size

    def open(self, sequence: Sequence) -> bool:
        """Gives a sequence its pages, the first of them shared with the longest cached prefix of its tokens.

        Sets `committed`. At least the last token is left to compute, because its logits choose the next one.
        Returns False, and does nothing, while live sequences hold too much.
        """
        if self.shortfall_of_waiting(sequence) > 0:
            return False
        cached = self._find(sequence)
        sequence.committed = cached.size * self.page_size
        behind = self._behind(sequence.committed)
        shared = cached[behind:]
        self._prefixes.reuse(shared)
        self._pages.share(shared)
        prefix = sequence.cached_prefix or CachedPrefix(sequence.request.tenant)
        sequence.cached_prefix = None
        table = sequence.page_table = PageTable(cached.copy(), prefix, cached.size, behind, shared=cached.size)
        table.pages[:behind] = NULL_PAGE
        self._extend(sequence, self._need(sequence, sequence.committed) - table.pages.size)
        if self._states is not None and shared.size:
            first = int(table.pages[shared.size])
            self._states.resume(int(shared[-1]), first, sequence.committed)
        return True

    def shortfall_of_waiting(self, sequence: Sequence) -> int:
        """How many pages live sequences must give up before a waiting one can be opened; 0 or less for none.

        Looks at what is new since the last time alone; `leave` forgets what was found.
        """
        cached = self._find(sequence)
        committed = cached.size * self.page_size
        reused = self._prefixes.count_retained(cached[self._behind(committed) :])
        return self._need(sequence, committed) - cached.size - (self.available - reused)

    def leave(self, sequence: Sequence) -> None:
        """A sequence stopped waiting."""
        sequence.cached_prefix = None

    def record(self, sequence: Sequence) -> None:
        """Makes what is committed of the prompt of a live sequence findable. Cheap if there is nothing new."""
        self._record(sequence, min(sequence.committed, int(sequence.request.prompt.size)))

    def is_short(self, sequence: Sequence) -> bool:
        """Whether the next step of the sequence may need more than its pages hold."""
        tokens = sequence.longest_now
        if self.window is not None:
            tokens = min(tokens, sequence.committed + self.window.step)
        return tokens > sequence.kv.longest

    def shortfall(self, sequences: Iterable[Sequence]) -> int:
        """How many pages others must give up before these live sequences can grow; 0 or less for none."""
        wanted = sum(self._need(sequence, sequence.committed) - sequence.kv.pages.size for sequence in sequences)
        return wanted - self.available

    def victims(self, candidates: Iterable[Sequence], missing: int) -> list[Sequence] | None:
        """The first of these live sequences, at least one, that hold so many pages together and with no others.

        None if all of them hold fewer.
        """
        references, alone, chosen = self._pages.references, 0, []
        times = np.zeros_like(references)
        for sequence in candidates:
            pages = self.pages(sequence)[sequence.kv.freed :]
            times[pages] += 1
            alone += int(np.count_nonzero(times[pages] == references[pages]))
            chosen.append(sequence)
            if missing <= alone:
                return chosen
        return None

    def grow(self, sequence: Sequence) -> None:
        """Gives a sequence the pages that it needs; its shortfall must be 0 or less."""
        self._extend(sequence, self._need(sequence, sequence.committed) - sequence.kv.pages.size)

    def trim(self, sequence: Sequence) -> None:
        """Takes back pages that lie behind the window of all that a live sequence computes from now on."""
        table, behind = sequence.kv, self._behind(sequence.committed)
        if behind <= table.freed:
            return
        self._record(sequence, behind * self.page_size)
        pages = table.pages.copy()  # a step in flight may look at the old one
        pages[table.freed : behind] = NULL_PAGE
        freed, table.pages, table.freed = table.pages[table.freed : behind], pages, behind
        unused, cached = self._released(freed)
        self._prefixes.retain(cached)
        self._pages.free(unused)

    def close(self, sequence: Sequence, keep: bool = True) -> None:
        """Takes back the pages of a sequence.

        Args:
            keep: what is committed is valid: keep it for later sequences. Otherwise what only this one holds is
                forgotten.
        """
        if keep:
            self._record(sequence, min(sequence.committed, self._shareable(sequence)))
        table, sequence.page_table = sequence.kv, None
        unused, cached = self._released(table.held)
        if self._states is not None:
            self._states.release([*unused.tolist(), *cached.tolist()], kept=keep)
        if table.freed:
            freed = self._prefixes.retained_pages(table.prefix.hashes[: table.freed])
            cached = np.concatenate([freed, cached])
            self._prefixes.reuse(cached)
        if keep:
            self._prefixes.retain(cached[::-1])  # a block is found by the ones before it, so it is of use no longer
        else:
            self._prefixes.forget(cached)
            unused = np.concatenate([unused, cached])
        self._pages.free(unused)

    def check(self, live: list[Sequence], waiting: SequenceOf[Sequence] | None = None) -> None:
        """Asserts that live sequences alone have page tables, and that every page is counted once.

        Args:
            waiting: those that a cached prefix may be known of; None for any.
        """
        tables = [sequence.kv.held for sequence in live]
        held = np.concatenate([np.empty(0, np.int32), *tables])
        assert not any(sequence.cached_prefix for sequence in live)
        assert not any(sequence.page_table for sequence in waiting or ())
        assert np.bincount(held, minlength=self._pages.references.size).tolist() == self._pages.references.tolist()
        assert self.available + np.unique(held).size == self._pages.references.size
        assert self.prefix_cache or not self._prefixes.retained
        for sequence in live:
            table = sequence.kv
            assert sequence.committed <= table.pages.size * self.page_size
            assert (table.pages[: table.freed] == NULL_PAGE).all()
            assert table.freed <= self._behind(sequence.committed)
            # What will be written next is in no other table, and cannot be found.
            unwritten = table.pages[sequence.committed // self.page_size :]
            assert (self._pages.references[unwritten] == 1).all()
            assert not self._prefixes.known(unwritten).any()
        self._pages.check()
        self._prefixes.check()

    def _need(self, sequence: Sequence, committed: int) -> int:
        """How many pages the table of the sequence should have after `committed` tokens, with those given up."""
        tokens = min(sequence.longest_now + GROWTH, sequence.longest)
        if self.window is not None:
            tokens = min(tokens, committed + self.window.step + GROWTH)
        return -(-(tokens + sequence.request.drafting.max_nodes) // self.page_size)

    def _behind(self, committed: int) -> int:
        """How many pages lie behind the window of the token at position `committed`, and so of all later ones."""
        return 0 if self.window is None else max(0, (committed - self.window.tokens + 1) // self.page_size)

    def _released(self, pages: Int32Array) -> tuple[Int32Array, Int32Array]:
        """Of pages that a sequence holds no more, those that no other does: such as are of no use, and cached ones."""
        unused = self._pages.release(pages)
        known = self._prefixes.known(unused)
        return unused[~known], unused[known]

    def _find(self, sequence: Sequence) -> Int32Array:
        """int32[p], the pages of the longest cached prefix that a waiting sequence can begin with."""
        if not self.prefix_cache:
            return np.empty(0, np.int32)
        prefix = sequence.cached_prefix
        if prefix is None:
            prefix = sequence.cached_prefix = CachedPrefix(sequence.request.tenant)
        self._prefixes.look_up(prefix)
        full, count = min(sequence.length - 1, self._shareable(sequence)) // self.page_size, 1
        while prefix.pages.size == (hashed := len(prefix.hashes)) < full:
            self._hash(sequence, prefix, min(hashed + count, full))
            self._prefixes.look_up(prefix)
            count *= 2
        known = prefix.pages.size  # with states: up to a page after which they are known
        while self._states is not None and known and not self._states.resumes_after(int(prefix.pages[known - 1])):
            known -= 1
        return prefix.pages[:known]

    def _shareable(self, sequence: Sequence) -> int:
        """How many of its tokens others may begin with."""
        return sequence.length if self._states is None else int(sequence.request.prompt.size)

    def _hash(self, sequence: Sequence, prefix: CachedPrefix, blocks: int) -> None:
        """Hashes its blocks up to so many."""
        hashed, size = len(prefix.hashes), self.page_size
        if blocks > hashed:
            prefix.append(sequence.tokens(hashed * size, (blocks - hashed) * size), size)

    def _record(self, sequence: Sequence, committed: int) -> None:
        table, full = sequence.kv, committed // self.page_size
        if self.prefix_cache and full > table.recorded:
            self._hash(sequence, table.prefix, full)
            self._prefixes.add(table.prefix.hashes[table.recorded : full], table.pages[table.recorded : full])
            table.recorded = full

    def _extend(self, sequence: Sequence, count: int) -> None:
        """Adds pages to a page table; forgets the least recently used prefixes if need be."""
        table = sequence.kv
        if (missing := count - self._pages.num_free) > 0:
            forgotten = self._prefixes.forget_oldest(missing)
            if self._states is not None:
                self._states.release(forgotten.tolist(), kept=False)
            self._pages.free(forgotten)
        after = int(table.pages[-1]) if table.pages.size else -1
        table.pages = np.concatenate([table.pages, self._pages.allocate(count, after)])
        table.longest = table.pages.size * self.page_size - sequence.request.drafting.max_nodes
