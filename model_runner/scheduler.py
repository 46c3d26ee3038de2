"""Who runs in the next step, and how many tokens of each. Holds no torch; owns every sequence's state."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from model_runner.sequence import Sequence, SequenceState

_SLAB_ROUNDING = 128


@dataclass(frozen=True, slots=True)
class Work:
    """A sequence's share of a step: its next `tokens` tokens that are not in the KV cache yet.

    Where they reach the end of what is known, the step also drafts and writes new tokens.
    """

    sequence: Sequence
    tokens: int

    @property
    def reaches_end(self) -> bool:
        return self.sequence.committed + self.tokens == self.sequence.length


def kv_need(length: int, draft_nodes: int) -> int:
    """KV cache tokens of a sequence of at most `length` tokens with at most `draft_nodes` in a draft tree."""
    return -(-(length + draft_nodes) // _SLAB_ROUNDING) * _SLAB_ROUNDING


def sequence_kv_need(sequence: Sequence) -> int:
    """KV cache tokens that the sequence may come to use."""
    return kv_need(int(sequence.prompt.size) + sequence.stop.max_tokens, sequence.max_draft_nodes)


class Scheduler:
    """First come, first served, within the number of slots and the KV cache's capacity.

    A sequence that decodes runs in every step; those in prefill share `prefill_chunk` tokens a step, so that a
    long prompt does not hold up the others' next token.

    Args:
        max_running: sequences that run at once.
        prefill_chunk: prompt tokens a step, over all sequences.
        kv_capacity: tokens that the KV cache holds, over all sequences.
    """

    def __init__(self, max_running: int, prefill_chunk: int, kv_capacity: int) -> None:
        self._max_running = max_running
        self._prefill_chunk = prefill_chunk
        self._kv_capacity = kv_capacity
        self._kv_reserved = 0
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Moves waiting sequences to running, in order, while slots and KV cache last; returns those moved."""
        admitted = []
        while self.waiting and len(self.running) < self._max_running:
            need = sequence_kv_need(self.waiting[0])
            if self._kv_reserved + need > self._kv_capacity:
                break
            sequence = self.waiting.popleft()
            sequence.state = SequenceState.RUNNING
            self._kv_reserved += need
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def plan(self) -> list[Work]:
        """The next step's work, for running sequences in the order of their admission."""
        work, chunk_left = [], self._prefill_chunk
        for sequence in self.running:
            pending = sequence.length - sequence.committed
            tokens = pending if pending == 1 else min(pending, chunk_left)
            if pending > 1:
                chunk_left -= tokens
            if tokens:
                work.append(Work(sequence, tokens))
        return work

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is. Its slot and KV reservation are free; once finished, does nothing."""
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
            self._kv_reserved -= sequence_kv_need(sequence)
        sequence.state = SequenceState.FINISHED

    def check(self) -> None:
        """Asserts that slots, reservations and states agree."""
        assert len(self.running) <= self._max_running
        assert self._kv_reserved == sum(map(sequence_kv_need, self.running)) <= self._kv_capacity
        assert all(s.state is SequenceState.RUNNING for s in self.running)
        assert all(s.state is SequenceState.WAITING for s in self.waiting)
