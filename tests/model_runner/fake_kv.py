"""A KV store that holds the tokens themselves in place of keys and values, so that tests see what is in which row."""

from __future__ import annotations

from itertools import count

from model_runner.errors import KVAllocationError
from model_runner.scheduling.kv_pool import KVPool
from model_runner.scheduling.scheduler import Work

JUNK = -1


class FakeStore:
    """Allocates regions within a capacity; a freed region is gone.

    Attributes:
        rows: of each allocated region.
        device_tokens: what the device has memory for; less than `capacity` makes allocations fail.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.device_tokens = capacity
        self.rows: dict[int, list[int]] = {}
        self._numbers = count()

    @property
    def allocated_tokens(self) -> int:
        return sum(map(len, self.rows.values()))

    def allocate(self, tokens: int) -> int:
        assert self.allocated_tokens + tokens <= self.capacity
        if self.allocated_tokens + tokens > self.device_tokens:
            raise KVAllocationError(tokens, tokens)
        number = next(self._numbers)
        self.rows[number] = [JUNK] * tokens
        return number

    def free(self, region: int) -> None:
        del self.rows[region]

    def copy(self, source: int, target: int, rows: int) -> None:
        assert rows <= min(len(self.rows[source]), len(self.rows[target]))
        self.rows[target][:rows] = self.rows[source][:rows]


def run(pool: KVPool, work: Work, written: list[int]) -> None:
    """What the engine does with a sequence in a step: reads all that is committed, writes rows, commits, appends.

    Args:
        written: what the sequence writes if the step reaches its end: all but the last were drafted.
    """
    sequence, store = work.sequence, pool._store
    assert isinstance(store, FakeStore)
    rows, nodes = store.rows[pool.region(sequence)], sequence.request.max_draft_nodes
    start, end = sequence.committed, sequence.committed + work.tokens
    assert rows[:start] == sequence.tokens(0, start).tolist()
    rows[start:end] = sequence.tokens(start, work.tokens).tolist()
    reaches_end, sequence.committed = work.reaches_end, end
    if reaches_end:
        assert end + nodes <= len(rows)
        rows[end : end + nodes] = [JUNK] * nodes
        rows[end : end + len(written) - 1] = written[:-1]
        sequence.committed += len(written) - 1
        sequence.output.extend(written)
