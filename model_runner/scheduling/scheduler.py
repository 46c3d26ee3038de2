"""Who runs in the next step, and how many tokens of each. Holds no torch; owns every sequence's state."""

from __future__ import annotations

import itertools
import math
from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from model_runner.scheduling.fair_queue import FairQueue, Rank
from model_runner.scheduling.kv_pool import KVPool
from model_runner.scheduling.prefix_cache import BLOCK, common_prefix
from model_runner.sequence import Sequence, SequenceState

PRIORITY_SECONDS = 60.0
"""One level of priority counts like having arrived this much earlier, so that nobody waits for ever."""

_STEP_PRICE = 2
"""What a decoding step counts in a tenant's service, in prompt tokens: the ratio that the VTC paper takes."""


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


class Scheduler:
    """Continuous batching: sequences join and leave at every step, within the number of slots and the KV memory.

    Sequences have a rank, which is their time of arrival put forward by their priority. A tenant's sequences are
    admitted by rank; tenants take turns by weighted service. Admission asks for the memory that a sequence needs at
    first. When a running one needs more and there is none, the last by rank gives up its keys and values and waits,
    ahead of all that never ran, to compute them again. The first by rank is never the victim of another, so something
    always gets done, and as ranks do not change, everybody is the first some day.

    A sequence that decodes runs in every step. Those in prefill share a chunk of tokens, a smaller one where other
    sequences decode in the same step, so that a long prompt does not hold up their next tokens.

    Args:
        pool: the KV memory.
        max_running: sequences that run at once.
        prefill_chunk: prompt tokens a step, over all sequences, where none decodes.
        shared_chunk: the same, where any decodes.
        weights: a tenant's share of admissions and of prefill next to the others'; 1 for those not named.

    Attributes:
        step_seconds: the least time that a step takes, as far as it is known; tells which deadlines can't be met.
    """

    def __init__(
        self,
        pool: KVPool[Any],
        max_running: int,
        prefill_chunk: int,
        shared_chunk: int,
        weights: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._pool = pool
        self._max_running = max_running
        self._prefill_chunk = prefill_chunk
        self._shared_chunk = min(shared_chunk, prefill_chunk)
        self._serial = itertools.count()
        self._ranks: dict[Sequence, Rank] = {}
        self._queue = FairQueue(self._ranks.__getitem__, weights)
        self._next_deadline = math.inf
        self.step_seconds = 0.0
        self.running: list[Sequence] = []
        self.preempted: list[Sequence] = []

    @property
    def waiting(self) -> int:
        return len(self._queue) + len(self.preempted)

    @property
    def live(self) -> list[Sequence]:
        return list(self._ranks)

    def add(self, sequence: Sequence) -> None:
        """A new sequence waits."""
        rank = sequence.stats.arrived_at - PRIORITY_SECONDS * sequence.priority
        self._ranks[sequence] = (rank, next(self._serial))
        self._queue.enter(sequence)
        self._next_deadline = min(self._next_deadline, self._limit(sequence))

    def overdue(self, now: float) -> list[Sequence]:
        """Sequences whose deadline has passed or can't be met any more; the caller finishes them."""
        if now < self._next_deadline:
            return []
        limits = [(self._limit(sequence), sequence) for sequence in self._ranks]
        self._next_deadline = min((limit for limit, _ in limits if limit > now), default=math.inf)
        return [sequence for limit, sequence in limits if limit <= now]

    def schedule(self) -> list[Work]:
        """The next step's work: finds memory for those who run, admits who fits, shares out the prefill chunk."""
        for sequence in self.running:
            self._pool.record(sequence)
        for sequence in sorted(filter(self._pool.is_short, self.running), key=self._rank):
            if sequence.state is SequenceState.RUNNING:
                self._find_memory(sequence)
        self._admit()
        return self._work()

    def finish(self, sequence: Sequence, keep: bool = True) -> None:
        """Takes a sequence out, wherever it is; once finished, does nothing.

        Args:
            keep: its keys and values are sound and may serve as a prefix for its tenant's next sequences.
        """
        if sequence.state is SequenceState.FINISHED:
            return
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
            self._pool.close(sequence, keep)
        elif sequence in self.preempted:
            self.preempted.remove(sequence)
        else:
            self._queue.remove(sequence)
        sequence.state = SequenceState.FINISHED
        del self._ranks[sequence]
        self._queue.leave(sequence.tenant)

    def check(self) -> None:
        """Asserts that slots, memory, queues and states agree."""
        waiting = [*self._queue, *self.preempted]
        assert len(self.running) <= self._max_running
        assert all(s.state is SequenceState.RUNNING for s in self.running)
        assert all(s.state is SequenceState.WAITING for s in waiting)
        assert all(s.committed == 0 for s in waiting)
        assert len({*self.running, *waiting}) == len(self.running) + len(waiting) == len(self._ranks)
        assert self._ranks.keys() == {*self.running, *waiting}
        assert self.preempted == sorted(self.preempted, key=self._rank)
        self._queue.check(self.live)
        self._pool.check(self.running)

    def _rank(self, sequence: Sequence) -> Rank:
        return self._ranks[sequence]

    def _limit(self, sequence: Sequence) -> float:
        """When the sequence must have run, or, while it waits, must start: its prefill takes some steps at least."""
        if sequence.deadline is None:
            return math.inf
        if sequence.state is SequenceState.RUNNING:
            return sequence.deadline
        return sequence.deadline - self.step_seconds * math.ceil(sequence.length / self._prefill_chunk)

    def _find_memory(self, sequence: Sequence) -> None:
        """Grows a running sequence's slab, at the cost of those behind it by rank, or else preempts it itself."""
        victims = self._victims(sequence)
        for victim in victims:
            self._preempt(victim)
        if sequence not in victims:
            self._pool.grow(sequence)

    def _victims(self, sequence: Sequence) -> list[Sequence]:
        """Who gives up memory so that a sequence can grow: the last by rank, or itself where that is not enough."""
        missing, victims = self._pool.shortfall(sequence), []
        if missing <= 0:
            return []
        for other in sorted(self.running, key=self._rank, reverse=True):
            if other is sequence:
                return [sequence]
            victims.append(other)
            missing -= self._pool.size(other)
            if missing <= 0:
                return victims
        raise AssertionError("the sequence is not running")

    def _preempt(self, sequence: Sequence) -> None:
        """Its keys and values stay as long as nobody needs the memory."""
        self.running.remove(sequence)
        self._pool.close(sequence)
        sequence.state = SequenceState.WAITING
        sequence.committed = 0
        sequence.stats.preemptions += 1
        insort(self.preempted, sequence, key=self._rank)

    def _admit(self) -> None:
        """Fills free slots. Who is next and does not fit holds up the others, or large ones would wait for ever."""
        while len(self.running) < self._max_running:
            sequence = self._next()
            if sequence is None or not self._pool.open(sequence):
                return
            if self.preempted:
                self.preempted.remove(sequence)
            else:
                self._queue.remove(sequence)
                self._queue.charge(sequence.tenant, sequence.length - sequence.committed)
                sequence.stats.cached_prompt_tokens = sequence.committed
            sequence.state = SequenceState.RUNNING
            self.running.append(sequence)

    def _next(self) -> Sequence | None:
        if self.preempted:
            return self.preempted[0]
        return next((head for head in self._queue.heads() if not self._gains_by_waiting(head)), None)

    def _gains_by_waiting(self, sequence: Sequence) -> bool:
        """Whether a running sequence is about to compute a part of this one's prompt, which it can take over then.

        It waits no longer than that part would take itself. So samples of one prompt share its prefill.
        """
        if not self._pool.prefix_cache:
            return False
        shared = [
            common_prefix(other.prompt, sequence.prompt)
            for other in self.running
            if other.tenant == sequence.tenant and other.committed < other.prompt.size
        ]
        return max(shared, default=0) >= BLOCK and max(shared) >= self._pool.cached(sequence) + BLOCK

    def _work(self) -> list[Work]:
        """One token for each that decodes, and for each tenant in prefill a share of the chunk, spent by rank."""
        pending = {sequence: sequence.length - sequence.committed for sequence in self.running}
        prefill: dict[str, list[Sequence]] = {}
        for sequence, tokens in pending.items():
            if tokens > 1:
                prefill.setdefault(sequence.tenant, []).append(sequence)
            else:
                self._queue.charge(sequence.tenant, _STEP_PRICE)
        if prefill:
            decodes = any(tokens == 1 for tokens in pending.values())
            wanted = {tenant: sum(map(pending.__getitem__, sequences)) for tenant, sequences in prefill.items()}
            shares = self._queue.split(self._shared_chunk if decodes else self._prefill_chunk, wanted)
            for tenant, sequences in prefill.items():
                for sequence in sorted(sequences, key=self._rank):
                    pending[sequence] = min(pending[sequence], shares[tenant])
                    shares[tenant] -= pending[sequence]
        return [Work(sequence, tokens) for sequence, tokens in pending.items() if tokens]
