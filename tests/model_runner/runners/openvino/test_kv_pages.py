"""KV pages against a model of plain lists: whatever regions share, each holds the rows that were written to it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from model_runner.errors import KVAllocationError
from model_runner.runners.base import KVMoves
from model_runner.runners.openvino.kv_pages import PAGE, KVPages, PageLayout

LAYOUT = PageLayout(layers=2, kv_heads=3, key_dim=4, value_dim=5, dtype="float32")
CAPACITY = 12 * PAGE


def write(kv: KVPages, region: int, first: int, values: list[int]) -> None:
    """What a step does: rows from the committed length on."""
    pages = kv.pages(region, first, first + len(values))
    for row, value in enumerate(values, first):
        kv.keys[:, pages[row // PAGE], :, row % PAGE] = value
        kv.values[:, pages[row // PAGE], :, row % PAGE] = -value


def read(kv: KVPages, region: int, rows: int) -> list[int]:
    """The first rows, the same in every layer, head and column."""
    found = []
    for row in range(rows):
        page = kv._pages[region][row // PAGE]
        keys, values = kv.keys[:, page, :, row % PAGE], kv.values[:, page, :, row % PAGE]
        assert (keys == keys.flat[0]).all()
        assert (values == -keys.flat[0]).all()
        found.append(int(keys.flat[0]))
    return found


class Pages(RuleBasedStateMachine):
    """Regions as lists of their committed rows."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVPages(LAYOUT, CAPACITY)
        self.sizes: dict[int, int] = {}
        self.rows: dict[int, list[int]] = {}
        self.next = 0

    def _new(self, tokens: int) -> int | None:
        if sum(self.sizes.values()) + tokens > CAPACITY:
            return None
        number = self.kv.allocate(tokens)
        assert number not in self.sizes
        self.sizes[number], self.rows[number] = tokens, []
        return number

    @rule(tokens=st.integers(16, 4 * PAGE))
    def allocate(self, tokens: int) -> None:
        self._new(tokens)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Some rows are written, of which an ascending choice is accepted."""
        region = data.draw(st.sampled_from(sorted(self.rows)))
        committed, size = len(self.rows[region]), self.sizes[region]
        count = data.draw(st.integers(0, min(size - committed, 40)))
        if not count:
            return
        values = list(range(self.next, self.next + count))
        self.next += count
        write(self.kv, region, committed, values)
        accepted = sorted(data.draw(st.sets(st.integers(0, count - 1))))
        moves = [(region, committed + row, committed + i) for i, row in enumerate(accepted) if row != i]
        self.kv.move(KVMoves(*np.array(moves, np.int32).reshape(-1, 3).T))
        self.rows[region] += [values[row] for row in accepted]

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), extra=st.integers(0, PAGE))
    def copy(self, data: st.DataObject, extra: int) -> None:
        source = data.draw(st.sampled_from(sorted(self.rows)))
        rows = data.draw(st.integers(0, len(self.rows[source])))
        target = self._new(max(16, rows + extra))
        if target is not None:
            self.kv.copy(source, target, rows)
            self.rows[target] = self.rows[source][:rows]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        region = data.draw(st.sampled_from(sorted(self.rows)))
        self.kv.free(region)
        del self.rows[region], self.sizes[region]

    @invariant()
    def holds_what_was_written(self) -> None:
        assert self.kv.allocated_tokens == sum(self.sizes.values())
        for region, rows in self.rows.items():
            assert read(self.kv, region, len(rows)) == rows

    @invariant()
    def every_page_is_counted(self) -> None:
        held = [page for pages in self.kv._pages.values() for page in pages.tolist()]
        assert np.bincount(held, minlength=len(self.kv._references)).tolist() == self.kv._references.tolist()
        assert sorted({*held, *self.kv._free}) == list(range(len(self.kv._references)))
        assert not {*held} & {*self.kv._free}


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=25, stateful_step_count=25)


@given(st.lists(st.integers(16, 3 * PAGE)))
def test_regions_within_the_capacity_always_find_pages(sizes: list[int]) -> None:
    kv, allocated = KVPages(LAYOUT, CAPACITY), 0
    for tokens in sizes:
        if allocated + tokens <= CAPACITY:
            kv.allocate(tokens)
            allocated += tokens
    assert kv.allocated_tokens == allocated


def test_full_pages_are_shared_and_the_last_one_is_copied() -> None:
    kv = KVPages(LAYOUT, CAPACITY)
    first, second = kv.allocate(3 * PAGE), kv.allocate(3 * PAGE)
    write(kv, first, 0, list(range(2 * PAGE + 5)))
    kv.copy(first, second, 2 * PAGE + 5)
    assert kv._pages[first][:2].tolist() == kv._pages[second][:2].tolist()
    assert kv._pages[first][2] != kv._pages[second][2]
    write(kv, second, 2 * PAGE + 5, [1000])
    assert read(kv, first, 2 * PAGE + 5) == list(range(2 * PAGE + 5))
    assert read(kv, second, 2 * PAGE + 6) == [*range(2 * PAGE + 5), 1000]
    kv.free(first)
    assert read(kv, second, 2 * PAGE) == list(range(2 * PAGE))


def test_a_shared_page_is_never_written() -> None:
    kv = KVPages(LAYOUT, CAPACITY)
    first, second = kv.allocate(2 * PAGE), kv.allocate(2 * PAGE)
    kv.copy(first, second, PAGE)
    with pytest.raises(AssertionError, match="shared page"):
        kv.pages(first, PAGE - 1, PAGE)


def test_memory_that_there_is_not_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = KVPages(LAYOUT, 2 * PAGE)
    with pytest.raises(KVAllocationError, match="320 tokens"):
        kv.allocate(10 * PAGE)
    assert kv.allocated_tokens == 0

    def zeros(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "zeros", zeros)
    with pytest.raises(KVAllocationError, match="64 tokens"):
        KVPages(LAYOUT, 2 * PAGE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_costs_what_the_layout_reports(dtype: str) -> None:
    kv = KVPages(PageLayout(2, 3, 4, 5, dtype), PAGE)
    assert kv.layout.bytes_per_token * 2 * PAGE == kv.keys.nbytes + kv.values.nbytes
    assert {tensor.byte_size for tensor in kv.tensors().values()} == {kv.keys[0].nbytes, kv.values[0].nbytes}
