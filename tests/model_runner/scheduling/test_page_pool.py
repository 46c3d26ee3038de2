"""Pages: who holds which, and that they are neighbours where there is room."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from draftwood_model_runner.scheduling.page_pool import PagePool


def test_tables_grow_in_place_on_both_sides() -> None:
    pool = PagePool(128)
    tables = [pool.allocate(3) for _ in range(4)]
    for _ in range(3):
        tables = [np.concatenate([table, pool.allocate(2, after=int(table[-1]))]) for table in tables]
    for table in tables:
        assert np.diff(table).tolist() == [1] * 8
    assert len({page for table in tables for page in table.tolist()}) == 36


def test_a_table_that_has_no_room_goes_on_elsewhere() -> None:
    pool = PagePool(10)
    first = pool.allocate(4)
    assert first.tolist() == [3, 4, 5, 6]
    blocked = pool.allocate(2)
    more = pool.allocate(4, after=int(first[-1]))
    assert sorted([*first, *blocked, *more]) == list(range(10))
    assert pool.num_free == 0


class Pages(RuleBasedStateMachine):
    """Tables that take, share and release pages, against a count by hand."""

    @initialize(pages=st.integers(1, 40))
    def make(self, pages: int) -> None:
        self.pool, self.pages = PagePool(pages), pages
        self.tables: list[list[int]] = []

    @rule(count=st.integers(1, 12), after=st.integers(-1, 39))
    def take(self, count: int, after: int) -> None:
        if count <= self.pool.num_free:
            held = Counter(page for table in self.tables for page in table)
            taken = self.pool.allocate(count, min(after, self.pages - 1)).tolist()
            assert len({*taken}) == count
            assert not {*taken} & held.keys()
            self.tables.append(taken)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        shared = table[: data.draw(st.integers(1, len(table)))]
        self.pool.share(np.array(shared, np.int32))
        self.tables.append(shared)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        unused = self.pool.release(np.array(table, np.int32))
        held = {page for other in self.tables for page in other}
        assert unused.tolist() == [page for page in table if page not in held]
        self.pool.free(unused)

    @invariant()
    def counted(self) -> None:
        held = Counter(page for table in self.tables for page in table)
        assert self.pool.references.tolist() == [held[page] for page in range(self.pages)]
        assert self.pool.num_free == self.pages - len(held)
        self.pool.check()


TestPages = Pages.TestCase
