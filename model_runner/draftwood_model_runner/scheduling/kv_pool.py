"""The page tables of live sequences. Sequences that begin alike share pages. No torch.

Memory is paged as in vLLM (Kwon et al., 2023, arXiv 2309.06180): a sequence holds the pages for its tokens and a little
growth, not for the longest output that it may write. A sequence that begins like an earlier one of its tenant holds the
same full pages by reference. Nothing is ever copied: a sequence writes only at and beyond its committed length, and
shared pages lie below it.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from draftwood_model_runner.runners.base import PageStates
from draftwood_model_runner.scheduling.page_pool import PagePool
from draftwood_model_runner.scheduling.prefix_cache import Block, KnownPrefix, PrefixCache
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies.draft import Int32Array

GROWTH = 64
"""Tokens that a sequence can write at least before it needs further pages. Taking pages is cheap."""


class KVUse(NamedTuple):
    """Pages of KV memory: all, those that live sequences hold, and those that only the prefix cache does."""

    total: int = 0
    held: int = 0
    cached: int = 0


@dataclass(eq=False, slots=True)
class _PageTable:
    """The pages of a live sequence.

    Attributes:
        pages: int32[p]; token i of the sequence is in row i % page_size of page i // page_size.
        known: how many of them the prefix cache knows.
        last_known: the block of the last of these; the tenant for none.
        longest: tokens of the sequence up to which its next step fits, with its draft.
    """

    pages: Int32Array
    known: int
    last_known: Block | str
    longest: int = 0


class KVPool:
    """Shares out the pages: to live sequences first, and to prefixes that are kept for reuse with what is left.

    Args:
        pages: how many there are, at least as many as any sequence needs.
        page_size: tokens of a page.
        prefix_cache: keep the pages of ended sequences, and begin new sequences with the longest cached prefix.
        states: of recurrent layers; None for a model without. A prefix ends where one is known, and has no written
            tokens: a runner may compute those otherwise than tokens of a prompt.
    """

    def __init__(self, pages: int, page_size: int, prefix_cache: bool = True, states: PageStates | None = None) -> None:
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self._states = states
        self._pages = PagePool(pages)
        self._prefixes = PrefixCache(page_size, pages)
        self._tables: dict[Sequence, _PageTable] = {}
        self._known: dict[Sequence, KnownPrefix] = {}

    @property
    def available(self) -> int:
        """Pages that live sequences do not hold."""
        return self._pages.free + self._prefixes.retained

    @property
    def use(self) -> KVUse:
        total, cached = self._pages.references.size, self._prefixes.retained
        return KVUse(total, total - cached - self._pages.free, cached)

    def pages(self, sequence: Sequence) -> Int32Array:
        """int32[p], the page table of a live sequence."""
        return self._tables[sequence].pages

    def slot(self, sequence: Sequence, token: int) -> int:
        """Where keys and values of a token of a live sequence are: page * page_size + row."""
        page, row = divmod(token, self.page_size)
        return int(self._tables[sequence].pages[page]) * self.page_size + row

    def cached(self, sequence: Sequence) -> int:
        """How many of the tokens of a waiting sequence are cached. Looks at what is new since the last time alone."""
        return len(self._find(sequence).blocks) * self.page_size

    def open(self, sequence: Sequence) -> bool:
        """Gives a sequence its pages, the first of them shared with the longest cached prefix of its tokens.

        Sets `committed`. At least the last token is left to compute, because its logits choose the next one.
        Returns False, and does nothing, while live sequences hold too much.
        """
        missing = self.missing(sequence)
        if missing > 0:
            return False
        prefix = self._find(sequence)
        last_known: Block | str = prefix.blocks[-1] if prefix.blocks else sequence.request.tenant
        shared = prefix.pages
        self.leave(sequence)
        self._prefixes.reuse(shared)
        self._pages.share(shared)
        self._tables[sequence] = _PageTable(shared, shared.size, last_known)
        self._extend(sequence, self._need(sequence) - shared.size)
        sequence.committed = shared.size * self.page_size
        if self._states is not None and shared.size:
            first = int(self._tables[sequence].pages[shared.size])
            self._states.resume(int(shared[-1]), first, sequence.committed)
        return True

    def missing(self, sequence: Sequence) -> int:
        """How many pages live sequences must give up before a waiting one can be opened; 0 or less for none.

        Looks at what is new since the last time alone; `leave` forgets what was found.
        """
        prefix = self._find(sequence)
        return self._need(sequence) - len(prefix.blocks) - (self.available - prefix.retained)

    def leave(self, sequence: Sequence) -> None:
        """A sequence stopped waiting."""
        self._known.pop(sequence, None)

    def record(self, sequence: Sequence) -> None:
        """Makes what is committed of the prompt of a live sequence findable. Cheap if there is nothing new."""
        self._record(sequence, min(sequence.committed, int(sequence.request.prompt.size)))

    def is_short(self, sequence: Sequence) -> bool:
        """Whether the next step of the sequence may need more than its pages hold."""
        return sequence.length > self._tables[sequence].longest

    def shortfall(self, sequences: Iterable[Sequence]) -> int:
        """How many pages others must give up before these live sequences can grow; 0 or less for none."""
        return sum(self._need(one) - self._tables[one].pages.size for one in sequences) - self.available

    def enough(self, candidates: Iterable[Sequence], missing: int) -> list[Sequence] | None:
        """The first of these live sequences, at least one, that hold so many pages together and with no others.

        None if all of them hold fewer.
        """
        references, alone, chosen = self._pages.references, 0, []
        times = np.zeros_like(references)
        for sequence in candidates:
            pages = self.pages(sequence)
            times[pages] += 1
            alone += int(np.count_nonzero(times[pages] == references[pages]))
            chosen.append(sequence)
            if missing <= alone:
                return chosen
        return None

    def grow(self, sequence: Sequence) -> None:
        """Gives a sequence the pages that it needs; its shortfall must be 0 or less."""
        self._extend(sequence, self._need(sequence) - self._tables[sequence].pages.size)

    def close(self, sequence: Sequence, keep: bool = True) -> None:
        """Takes back the pages of a sequence.

        Args:
            keep: what is committed is valid: keep it for later sequences. Otherwise what only this one holds is
                forgotten.
        """
        if keep:
            self._record(sequence, min(sequence.committed, self._shareable(sequence)))
        unused = self._pages.release(self._tables.pop(sequence).pages)
        if self._states is not None:
            self._states.release(unused.tolist(), kept=keep)
        known = self._prefixes.known(unused)
        cached = unused[known]
        if keep:
            self._prefixes.retain(cached[::-1])  # a block is found by the ones before it, so it is of use no longer
            unused = unused[~known]
        else:
            self._prefixes.forget(cached)
        self._pages.put_back(unused)

    def check(self, live: list[Sequence], waiting: SequenceOf[Sequence] | None = None) -> None:
        """Asserts that live sequences alone have page tables, and that every page is counted once.

        Args:
            waiting: those that a cached prefix may be known of; None for any.
        """
        tables = [table.pages for table in self._tables.values()]
        held = np.concatenate([np.empty(0, np.int32), *tables])
        assert self._tables.keys() == set(live)
        assert not self._known.keys() & self._tables.keys()
        assert waiting is None or self._known.keys() <= {*waiting}
        assert np.bincount(held, minlength=self._pages.references.size).tolist() == self._pages.references.tolist()
        assert self.available + np.unique(held).size == self._pages.references.size
        assert self.prefix_cache or not self._prefixes.retained
        for sequence, table in self._tables.items():
            assert sequence.committed <= table.pages.size * self.page_size
            # What will be written next is in no other table, and cannot be found.
            own = table.pages[sequence.committed // self.page_size :]
            assert (self._pages.references[own] == 1).all()
            assert not any(page in self._prefixes for page in own.tolist())
        self._pages.check()
        self._prefixes.check()
        for prefix in self._known.values():
            self._prefixes.check_prefix(prefix)

    def _need(self, sequence: Sequence) -> int:
        """How many pages the sequence should have now."""
        tokens = min(sequence.length + GROWTH, sequence.longest) + sequence.request.max_draft_nodes
        return -(-tokens // self.page_size)

    def _find(self, sequence: Sequence) -> KnownPrefix:
        """The longest cached prefix of a waiting sequence."""
        if not self.prefix_cache:
            return KnownPrefix(sequence.request.tenant)
        prefix = self._known.get(sequence)
        if prefix is None:
            prefix = self._known[sequence] = KnownPrefix(sequence.request.tenant)
        self._prefixes.refresh(prefix)
        full, count = min(sequence.length - 1, self._shareable(sequence)) // self.page_size, 1
        while (known := len(prefix.blocks)) < full:
            count = min(count, full - known)
            tokens = sequence.tokens(known * self.page_size, count * self.page_size)
            if self._prefixes.extend(prefix, tokens) < count:
                break
            count *= 2
        return self._resumable(prefix)

    def _shareable(self, sequence: Sequence) -> int:
        """How many of its tokens others may begin with."""
        return sequence.length if self._states is None else int(sequence.request.prompt.size)

    def _resumable(self, prefix: KnownPrefix) -> KnownPrefix:
        """As much of a prefix as a sequence can begin with: up to a page after which the states are known."""
        known = len(prefix.blocks)
        while self._states is not None and known and not self._states.resumes_after(prefix.blocks[known - 1].page):
            known -= 1
        return self._prefixes.beginning(prefix, known)

    def _record(self, sequence: Sequence, committed: int) -> None:
        table, full = self._tables[sequence], committed // self.page_size
        if self.prefix_cache and full > table.known:
            start = table.known * self.page_size
            tokens = sequence.tokens(start, full * self.page_size - start)
            table.last_known = self._prefixes.add(table.last_known, tokens, table.pages[table.known : full])
            table.known = full

    def _extend(self, sequence: Sequence, count: int) -> None:
        """Adds pages to a page table; forgets the least recently used prefixes if need be."""
        table = self._tables[sequence]
        if (missing := count - self._pages.free) > 0:
            forgotten = self._prefixes.forget_oldest(missing)
            if self._states is not None:
                self._states.release(forgotten.tolist(), kept=False)
            self._pages.put_back(forgotten)
        after = int(table.pages[-1]) if table.pages.size else -1
        table.pages = np.concatenate([table.pages, self._pages.take(count, after)])
        table.longest = table.pages.size * self.page_size - sequence.request.max_draft_nodes
