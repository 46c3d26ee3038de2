"""The scheduler: which sequences run in the next step, and how many tokens of each. Owns their state. No torch."""

from __future__ import annotations

import itertools
import math
from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from model_runner.scheduling.fair_queue import FairQueue, Rank
from model_runner.scheduling.kv_pool import KVPool
from model_runner.scheduling.prefix_cache import common_prefix
from model_runner.sequence import Sequence, SequenceState

PRIORITY_SECONDS = 60.0
"""One level of priority counts like having arrived this much earlier, so that no request waits for ever. Not tuned."""

_STEP_PRICE = 2
"""Price of a decoding step in prompt tokens, for fairness between tenants: the ratio of the VTC paper."""


@dataclass(frozen=True, slots=True)
class Work:
    """The part of a sequence in a step: its next `tokens` tokens that are not in the KV cache yet."""

    sequence: Sequence
    tokens: int

    @property
    def reaches_end(self) -> bool:
        """They are the last known tokens of the sequence, so the step drafts and writes new ones."""
        return self.sequence.committed + self.tokens == self.sequence.length


class Scheduler:
    """Continuous batching: sequences join and leave at every step, within the number of slots and the KV memory.

    The rank of a sequence is its arrival time, earlier by its priority. The sequences of one tenant are admitted by
    rank; between tenants, weighted service decides. Admission needs KV memory for the tokens so far and a little
    growth. When a running sequence needs more and there is none, the last by rank is preempted: it loses its keys and
    values and waits, ahead of all that never ran, to recompute them. The first by rank is never preempted for another
    one, so there is always progress, and as ranks do not change, every sequence is the first at some time.

    A decoding sequence runs in every step. Sequences in prefill share a chunk of tokens, a smaller one if others decode
    in the same step, so that a long prompt does not delay their next tokens.

    Args:
        pool: the KV memory.
        max_running: most sequences that run at once.
        prefill_chunk: prompt tokens of a step, over all sequences, if none decodes.
        shared_chunk: the same, if any decodes.
        weights: the share of a tenant in admissions and prefill, relative to others; 1 for those not named.

    Attributes:
        step_seconds: estimate of the shortest step; tells which deadlines cannot be met.
    """

    def __init__(
        self,
        pool: KVPool,
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
        """Queues a new sequence."""
        rank = sequence.request.arrived_at - PRIORITY_SECONDS * sequence.request.priority
        self._ranks[sequence] = (rank, next(self._serial))
        self._queue.enter(sequence)
        self._next_deadline = min(self._next_deadline, self._limit(sequence))

    def overdue(self, now: float) -> list[Sequence]:
        """Sequences that missed their deadline or cannot meet it any more; the caller finishes them."""
        if now < self._next_deadline:
            return []
        limits = [(self._limit(sequence), sequence) for sequence in self._ranks]
        self._next_deadline = min((limit for limit, _ in limits if limit > now), default=math.inf)
        return [sequence for limit, sequence in limits if limit <= now]

    def schedule(self) -> list[Work]:
        """The work of the next step: finds memory for running sequences, admits waiting ones, splits the chunk."""
        for sequence in self.running:
            self._pool.record(sequence)
        for sequence in sorted(filter(self._pool.is_short, self.running), key=self._rank):
            if sequence.state is SequenceState.RUNNING:
                self._find_memory(sequence)
        self._admit()
        return self._work()

    def finish(self, sequence: Sequence, keep: bool = True) -> None:
        """Removes a sequence in whatever state; does nothing for a finished one.

        Args:
            keep: its keys and values are valid and may serve as a prefix for later sequences of the tenant.
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
        self._queue.leave(sequence.request.tenant)

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
        """The latest time for a running sequence to end, and for a waiting one to start its prefill."""
        if sequence.request.deadline is None:
            return math.inf
        if sequence.state is SequenceState.RUNNING:
            return sequence.request.deadline
        return sequence.request.deadline - self.step_seconds * math.ceil(sequence.length / self._prefill_chunk)

    def _find_memory(self, sequence: Sequence) -> None:
        """Gives a running sequence further pages; preempts those after it by rank if need be, or else itself."""
        for victim in self._victims(sequence):
            self._preempt(victim)
        if sequence.state is SequenceState.RUNNING:
            self._pool.grow(sequence)

    def _victims(self, sequence: Sequence) -> list[Sequence]:
        """The sequences to preempt so that this one can grow: the last by rank, or itself if that is not enough."""
        missing, victims = self._pool.shortfall(sequence), list[Sequence]()
        for other in sorted(self.running, key=self._rank, reverse=True):
            if missing <= 0 or missing <= self._pool.held_alone(victims):
                return victims
            if other is sequence:
                return [sequence]
            victims.append(other)
        raise AssertionError("the sequence is not running")

    def _preempt(self, sequence: Sequence) -> None:
        """Its keys and values stay cached while the memory is not needed."""
        self.running.remove(sequence)
        self._pool.close(sequence)
        sequence.state = SequenceState.WAITING
        sequence.committed = 0
        sequence.stats.preemptions += 1
        insort(self.preempted, sequence, key=self._rank)

    def _admit(self) -> None:
        """Fills free slots. A sequence that is next and does not fit holds up the others, or it would wait for ever."""
        while len(self.running) < self._max_running:
            sequence = self._next()
            if sequence is None:
                return
            if not self._pool.open(sequence):
                return
            if self.preempted:
                self.preempted.remove(sequence)
            else:
                self._queue.remove(sequence)
                self._queue.charge(sequence.request.tenant, sequence.length - sequence.committed)
                sequence.stats.cached_prompt_tokens = sequence.committed
            sequence.state = SequenceState.RUNNING
            self.running.append(sequence)

    def _next(self) -> Sequence | None:
        if self.preempted:
            return self.preempted[0]
        return next((head for head in self._queue.heads() if not self._gains_by_waiting(head)), None)

    def _gains_by_waiting(self, sequence: Sequence) -> bool:
        """Whether a running sequence is about to compute a prefix of this prompt, which can be shared then.

        The wait is no longer than computing that prefix would take. So samples of one prompt share its prefill.
        """
        if not self._pool.prefix_cache:
            return False
        shared = [
            common_prefix(other.request.prompt, sequence.request.prompt)
            for other in self.running
            if other.request.tenant == sequence.request.tenant and other.committed < other.request.prompt.size
        ]
        page = self._pool.page_size
        return max(shared, default=0) >= page and max(shared) >= self._pool.cached(sequence) + page

    def _work(self) -> list[Work]:
        """One token for each decoding sequence, and for each tenant in prefill a share of the chunk, spent by rank."""
        pending = {sequence: sequence.length - sequence.committed for sequence in self.running}
        prefill: dict[str, list[Sequence]] = {}
        for sequence, tokens in pending.items():
            if tokens > 1:
                prefill.setdefault(sequence.request.tenant, []).append(sequence)
            else:
                self._queue.charge(sequence.request.tenant, _STEP_PRICE)
        if prefill:
            decodes = any(tokens == 1 for tokens in pending.values())
            wanted = {tenant: sum(map(pending.__getitem__, sequences)) for tenant, sequences in prefill.items()}
            shares = self._queue.split(self._shared_chunk if decodes else self._prefill_chunk, wanted)
            for tenant, sequences in prefill.items():
                for sequence in sorted(sequences, key=self._rank):
                    pending[sequence] = min(pending[sequence], shares[tenant])
                    shares[tenant] -= pending[sequence]
        return [Work(sequence, tokens) for sequence, tokens in pending.items() if tokens]
