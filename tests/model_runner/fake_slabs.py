"""Slabs that hold the tokens themselves in place of keys and values, so that tests see whose rows are where."""

from __future__ import annotations

from model_runner.scheduling.kv_pool import KVPool
from model_runner.scheduling.scheduler import Work

JUNK = -1


class FakeSlab:
    def __init__(self, capacity: int) -> None:
        self.rows = [JUNK] * capacity

    @property
    def capacity(self) -> int:
        return len(self.rows)

    def copy_rows(self, source: FakeSlab, rows: int) -> None:
        assert rows <= min(self.capacity, source.capacity)
        self.rows[:rows] = source.rows[:rows]


class FakeStore:
    """Hands out slabs within a capacity; what comes back is junk from then on."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.out: set[FakeSlab] = set()

    def take(self, tokens: int) -> FakeSlab:
        slab = FakeSlab(tokens)
        self.out.add(slab)
        assert sum(slab.capacity for slab in self.out) <= self.capacity
        return slab

    def give_back(self, slab: FakeSlab) -> None:
        self.out.remove(slab)
        slab.rows = [JUNK] * slab.capacity


def run(pool: KVPool[FakeSlab], work: Work, written: list[int]) -> None:
    """What the engine does with a sequence in a step: reads all that is committed, writes rows, commits, appends.

    Args:
        written: what the sequence writes if the step reaches its end: all but the last were drafted.
    """
    sequence, slab = work.sequence, pool.slab(work.sequence)
    start, end = sequence.committed, sequence.committed + work.tokens
    assert slab.rows[:start] == sequence.tokens(0, start).tolist()
    slab.rows[start:end] = sequence.tokens(start, work.tokens).tolist()
    reaches_end, sequence.committed = work.reaches_end, end
    if reaches_end:
        assert end + sequence.max_draft_nodes <= slab.capacity
        slab.rows[end : end + sequence.max_draft_nodes] = [JUNK] * sequence.max_draft_nodes
        slab.rows[end : end + len(written) - 1] = written[:-1]
        sequence.committed += len(written) - 1
        sequence.output.extend(written)
