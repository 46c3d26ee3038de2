"""KV memory of the torch runner: what a step writes is what it and later ones read, wherever the pages are."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood_model_runner.runners.base import KVCompaction, KVShape, StepBatch
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.runners.torch.kv_cache import PAGE_SIZE, KVCache, KVLayout, StepEntries
from draftwood_strategies import EMPTY_TREE
from draftwood_strategies.draft import Int32Array

SHAPES = (KVShape(3, 4, 5), KVShape(1, 6, 2), KVShape(3, 4, 5))
LAYOUT = KVLayout(SHAPES, torch.float32, torch.device("cpu"))


def chain(pages: Int32Array, context: int, count: int) -> BatchRow:
    return BatchRow(pages, context, np.zeros(count, np.int32), EMPTY_TREE, logits_from=count)


def write(kv: KVCache, batch: StepBatch, values: list[int]) -> StepEntries:
    """Fills the entries of the step in every layer with these values, negative ones in the values."""
    entries = StepEntries(kv, batch)
    column = torch.tensor(values, dtype=torch.float32)[None, :, None]
    for layer, (heads, key_dim, value_dim) in enumerate(SHAPES):
        entries.write(layer, column.expand(heads, -1, key_dim), -column.expand(heads, -1, value_dim))
    return entries


def read(entries: StepEntries, row: int, count: int) -> list[float]:
    found: list[float] = []
    for layer, (heads, key_dim, value_dim) in enumerate(SHAPES):
        keys, values = entries.read(layer, row)
        found = keys[0, :count, 0].tolist()
        column = torch.tensor(found)[None, :, None]
        assert torch.equal(keys[:, :count], column.expand(heads, -1, key_dim))
        assert torch.equal(values[:, :count, :value_dim], -column.expand(heads, -1, value_dim))
    return found


@given(st.permutations(range(12)), st.booleans())
def test_a_step_reads_what_was_written_in_neighbouring_pages_or_not(order: list[int], exact: bool) -> None:
    layout = dataclasses.replace(LAYOUT, exact=exact)
    kv = KVCache(layout, 12 * PAGE_SIZE)
    scattered, neighbours = np.array(order[:5], np.int32), np.array(sorted(order[5:9]), np.int32)
    first = lay_out([chain(scattered, 0, 40), chain(neighbours, 0, 3)])
    write(kv, first, [*range(40), *range(100, 103)])
    entries = write(
        kv, lay_out([chain(neighbours, 3, 20), chain(scattered, 40, 9)]), [*range(103, 123), *range(40, 49)]
    )
    assert read(entries, 0, 23) == [*range(100, 123)]
    assert read(entries, 1, 49) == [*range(49)]
    if exact:
        assert entries.read(1, 1)[1][..., 5:].eq(1.0)[:, :49].all()


def test_neighbouring_pages_are_read_in_place() -> None:
    kv = KVCache(LAYOUT, 12 * PAGE_SIZE)
    in_place = StepEntries(kv, lay_out([chain(np.array([3, 4, 5, 9], np.int32), 0, 3 * PAGE_SIZE)]))
    gathered = StepEntries(kv, lay_out([chain(np.array([3, 4, 5, 9], np.int32), 0, 3 * PAGE_SIZE + 1)]))
    kv.keys[1].fill_(7.0)
    for entries, base in ((in_place, True), (gathered, False)):
        keys, _ = entries.read(1, 0)
        assert (keys.untyped_storage().data_ptr() == kv.keys[1].untyped_storage().data_ptr()) == base
        assert keys[:, : 3 * PAGE_SIZE].eq(7.0).all()


@given(st.integers(0, 10), st.sets(st.integers(0, 19)).map(sorted), st.permutations(range(4)))
def test_keeps_the_accepted_entries_in_order(committed: int, accepted: list[int], order: list[int]) -> None:
    kv = KVCache(LAYOUT, 4 * PAGE_SIZE)
    pages, others = np.array(order[:2], np.int32), np.array(order[2:], np.int32)
    write(kv, lay_out([chain(pages, 0, committed + 20), chain(others, 0, 20)]), [*range(committed + 20), *range(20)])
    slots = lay_out([chain(pages, 0, 2 * PAGE_SIZE)]).slot_mapping(PAGE_SIZE).astype(np.int32)
    moves = [(committed + row, committed + i) for i, row in enumerate(accepted) if row != i]
    sources, targets = slots[np.array(moves, np.int32).reshape(-1, 2).T]
    kv.move(KVCompaction(sources, targets, np.array([0, len(moves)], np.int32)))
    entries = StepEntries(kv, lay_out([chain(pages, 0, committed + 20), chain(others, 0, 20)]))
    expected = [*range(committed), *(committed + row for row in accepted)]
    assert read(entries, 0, len(expected)) == expected
    assert read(entries, 1, 20) == [*range(20)]


@pytest.mark.parametrize("exact", [False, True])
def test_a_token_costs_what_the_layout_says(exact: bool) -> None:
    layout = dataclasses.replace(LAYOUT, exact=exact)
    kv = KVCache(layout, PAGE_SIZE + 1)
    assert kv.pages == 2
    assert layout.bytes_per_token * 2 * PAGE_SIZE == sum(layer.nbytes for layer in (*kv.keys, *kv.values))
