"""How a request's output is learned: a scope around the request, and batches for the engine's thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from types import TracebackType
from typing import Protocol, Self

import numpy as np

from draftwood_service.memory.codec import Record
from draftwood_service.memory.replica.instances import learn
from draftwood_service.memory.replica.residents import Resident
from draftwood_strategies import Strategy
from draftwood_strategies.draft import Int32Array

_BATCH_TOKENS = 2048
"""Tokens learned at once between two steps: half a millisecond (`draftwood bench memory`: 0.25 us a token, 0.53 on a
slower machine), a fifth of the bundled model's shortest step. Otherwise not tuned."""


class HasOutput(Protocol):
    """A sequence, as far as learning needs it: the generated token ids."""

    @property
    def output(self) -> SequenceOf[int]: ...


class LearnOnExit:
    """One request's use of its tenant's memory. A context manager; the memory is pinned in this process meanwhile.

    On exit, every output is learned unless the memory was purged since the request began.

    Args:
        prompt: int32[p], learned with each output; None to learn outputs alone.
        learned: takes what is learned of one output, int32[n].
        release: unpins the memory.
    """

    def __init__(
        self,
        resident: Resident,
        strategy: Strategy,
        outputs: SequenceOf[HasOutput],
        prompt: Int32Array | None,
        learned: Callable[[LearnOnExit, Int32Array], None],
        release: Callable[[Resident], None],
    ) -> None:
        self.resident = resident
        self.strategy = strategy
        self.epoch = resident.epoch
        self.since = time.monotonic()
        self._outputs = outputs
        self._prompt = np.empty(0, np.int32) if prompt is None else prompt
        self._learned = learned
        self._release = release

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            for one in self._outputs:
                if one.output:
                    self._learned(self, np.concatenate([self._prompt, np.array(one.output, np.int32)]))
        finally:
            self._release(self.resident)


def learning_task(resident: Resident, batch: list[Int32Array], done: Future[None]) -> Callable[[], None]:
    """A task for the engine's thread: the memory's published strategies learn the batch; then `done` completes."""

    def task() -> None:
        for strategy in [*resident.strategies.values()]:
            learn(strategy, batch)
        if not done.done():
            done.set_result(None)

    return task


def batches(records: SequenceOf[Record]) -> Iterator[list[Int32Array]]:
    """The records' sequences in batches of at most `_BATCH_TOKENS`, at least one sequence in each."""
    batch: list[Int32Array] = []
    size = 0
    for record in records:
        if batch and size + record.tokens.size > _BATCH_TOKENS:
            yield batch
            batch, size = [], 0
        batch.append(record.tokens)
        size += int(record.tokens.size)
    if batch:
        yield batch
