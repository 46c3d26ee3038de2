"""KV memory that holds the tokens themselves in place of keys and values, so that tests see what is in which page."""

from __future__ import annotations

from draftwood_model_runner.scheduling.kv_pool import KVPool
from draftwood_model_runner.scheduling.scheduler import ScheduledSequence
from draftwood_model_runner.sequence import Sequence

JUNK = -1


class FakeMemory:
    """What an engine and its runner do with the pages of a pool, over tokens.

    Attributes:
        slots: what is in each.
    """

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.slots = [JUNK] * (pool.available * pool.page_size)

    def run(self, work: ScheduledSequence, written: list[int]) -> None:
        """A step of a sequence: reads what is committed and in the window, writes, commits, appends.

        Args:
            written: what the sequence writes if the step reaches its end: all but the last were drafted.
        """
        sequence, nodes = work.sequence, work.sequence.request.drafting.max_nodes
        start, end = sequence.committed, sequence.committed + work.tokens
        first = 0 if self.pool.window is None else max(0, start - self.pool.window.tokens + 1)
        assert self.read(work, first, start) == sequence.tokens(first, start - first).tolist()
        self.write(work, start, sequence.tokens(start, work.tokens).tolist())
        reaches_end, sequence.committed = work.reaches_end, end
        if reaches_end:
            self.write(work, end, [JUNK] * nodes)
            self.write(work, end, written[:-1])
            sequence.committed += len(written) - 1
            sequence.output.extend(written)

    def read(self, work: ScheduledSequence, start: int, end: int) -> list[int]:
        return [self.slots[self._slot(work.sequence, token)] for token in range(start, end)]

    def write(self, work: ScheduledSequence, start: int, tokens: list[int]) -> None:
        for i, token in enumerate(tokens, start):
            self.slots[self._slot(work.sequence, i)] = token

    def _slot(self, sequence: Sequence, token: int) -> int:
        page, row = divmod(token, self.pool.page_size)
        return int(self.pool.pages(sequence)[page]) * self.pool.page_size + row
