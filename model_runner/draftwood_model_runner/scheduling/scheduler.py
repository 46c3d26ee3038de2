"""What a step computes: how many tokens of which running sequences."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Collection, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import closing
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

from draftwood_model_runner.scheduling.fair_queue import FairQueue, SlotLimit, SlotShares
from draftwood_model_runner.scheduling.kv_pool import KVPool
from draftwood_model_runner.scheduling.page_pool import common_prefix
from draftwood_model_runner.sequence import Sequence, SequenceState

_MOST_SKIPPED = 3
"""The sequences of a tenant above its share skip at most this many steps in a row for the first tokens of others."""

_DECODE_COST = 2
"""What a decoding step counts in prompt tokens, for fairness between tenants: the ratio of the VTC paper."""

__all__ = ["PRIORITY_SECONDS", "ScheduledSequence", "Scheduler", "SchedulerOutput"]
_log = logging.getLogger(__name__)
PRIORITY_SECONDS = 60.0
"""A level of priority counts like this many seconds of earlier arrival, so no request waits for ever."""
_MAX_LOOKED_AT = 8
"""A step without a free slot looks at so many waiting sequences at most, if running ones give up too little."""


class ScheduledSequence(NamedTuple):
    """The part of a sequence in a step: its next `tokens` tokens that are not in the KV cache yet."""

    sequence: Sequence
    tokens: int

    @property
    def reaches_end(self) -> bool:
        """They are the last known tokens of the sequence, so the step drafts and writes new ones."""
        return self.sequence.committed + self.tokens == self.sequence.length


class SchedulerOutput(NamedTuple):
    """What a step computes.

    Attributes:
        scheduled: the sequences that take part.
        prompts_wait: prompts of the step's sequences need further steps.
    """

    scheduled: list[ScheduledSequence]
    prompts_wait: bool


class StepPlanner:
    """Plans the steps of running sequences.

    Args:
        queue: what the tenants were served, and the shares of those in prefill.
        shares: tells who holds more slots than its share.
        rank: the rank of a live sequence.
        prefill_chunk: prompt tokens of a step, over all sequences, if none decodes.
        shared_chunk: the same, if any decodes.
        block: tokens that the runner computes at once: a step of a few more costs as much as one of two full blocks,
            and leaves those few of its prompts to the next one. 1 if there is no such thing.
    """

    def __init__(
        self,
        queue: FairQueue,
        shares: SlotShares,
        prefill_chunk: int,
        shared_chunk: int,
        block: int = 1,
    ) -> None:
        self._queue = queue
        self._shares = shares
        self._prefill_chunk = prefill_chunk
        self._shared_chunk = min(shared_chunk, prefill_chunk)
        self._block = block
        self._skipped = 0

    def plan(
        self, running: SequenceOf[Sequence], in_flight: Collection[Sequence], microbatch: int | None
    ) -> SchedulerOutput:
        """One token for each decoding sequence, and for each tenant in prefill a share of the chunk, spent by rank.

        Charges the tenants for decoding. See `Scheduler.schedule` for `in_flight` and `microbatch`.
        """
        elsewhere = {*in_flight}
        pending: dict[Sequence, int] = {}
        prefill: dict[str, list[Sequence]] = {}
        decoding: dict[str, int] = {}
        left = len(running) if microbatch is None else microbatch
        for sequence in self._participating(running):
            if sequence in elsewhere:
                continue
            tokens, tenant = sequence.length - sequence.committed, sequence.request.tenant
            if tokens > 1:
                prefill.setdefault(tenant, []).append(sequence)
            elif left > 0:
                decoding[tenant] = decoding.get(tenant, 0) + 1
                left -= 1
            else:
                continue
            pending[sequence] = tokens
        for tenant, count in decoding.items():
            self._queue.charge(tenant, count * _DECODE_COST)
        decodes = any(sequence.length - sequence.committed == 1 for sequence in running) if prefill else True
        chunk = self._shared_chunk if decodes else self._prefill_chunk
        prompts_wait = self._split_chunk(prefill, pending, self._in_blocks(chunk, prefill, pending))
        return SchedulerOutput(
            [ScheduledSequence(sequence, tokens) for sequence, tokens in pending.items() if tokens], prompts_wait
        )

    def _in_blocks(self, chunk: int, prefill: dict[str, list[Sequence]], pending: dict[Sequence, int]) -> int:
        """The chunk; less what the step would have beyond its last full block, if that is at most half of another."""
        wanted = sum(pending[sequence] for sequences in prefill.values() for sequence in sequences)
        taken, others = min(chunk, wanted), sum(pending.values()) - wanted
        beyond = (others + taken) % self._block
        return taken - beyond if beyond <= min(self._block // 2, taken - 1) and others + taken > self._block else chunk

    def _split_chunk(self, prefill: dict[str, list[Sequence]], pending: dict[Sequence, int], chunk: int) -> bool:
        """Cuts what is pending of these prompts down to what fits the chunk; returns whether anything was cut."""
        wanted = {tenant: sum(map(pending.__getitem__, sequences)) for tenant, sequences in prefill.items()}
        shares = self._queue.split(chunk, wanted)
        cut = False
        for tenant, sequences in prefill.items():
            for sequence in sorted(sequences, key=attrgetter("rank")):
                tokens = min(pending[sequence], shares[tenant])
                cut = cut or tokens < pending[sequence]
                pending[sequence] = tokens
                shares[tenant] -= tokens
        return cut

    def _participating(self, running: SequenceOf[Sequence]) -> list[Sequence]:
        """The ready sequences; if the step ends a prompt, without those of other tenants above their share."""
        ready = [sequence for sequence in running if sequence.ready]
        chunk = self._shared_chunk
        if ending := [
            sequence for sequence in ready if not sequence.output and sequence.length - sequence.committed <= chunk
        ]:
            above = self._shares.over_share()
            ends = any(sequence.request.tenant not in above for sequence in ending)
            if above and ends and self._skipped < _MOST_SKIPPED:
                self._skipped += 1
                return [sequence for sequence in ready if sequence.request.tenant not in above]
        self._skipped = 0
        return ready


class Scheduler:
    """Continuous batching: sequences join and leave at every step, within the number of slots and the KV memory.

    The rank of a sequence is its arrival time, earlier by its priority; it orders the sequences of one tenant. Between
    tenants, weighted service decides (`FairQueue`). Slots belong to the tenants that have live sequences, by weight; a
    tenant uses the others' for as long as they leave them (`SlotShares`). When one asks for its own, the last by rank
    of the tenant that holds the most is preempted: it loses its keys and values, which stay cached while there is
    room, and waits at its rank. The same happens when a tenant was served much more than another, and when a running
    sequence needs more memory than there is. The sequence that would be preempted last always runs, so there is always
    progress.

    A decoding sequence runs in every step unless its grammar's mask is not computed yet. A tenant above its share skips
    the step that ends another's prompt, which then takes less time. Sequences in prefill share a chunk of tokens, a
    smaller one if others decode, so that a long prompt does not delay their next tokens.

    Args:
        pool: the KV memory.
        max_running: most sequences that run at once.
        prefill_chunk: prompt tokens of a step, over all sequences, if none decodes.
        shared_chunk: the same, if any decodes.
        weights: the share of a tenant in admissions and prefill, relative to others; 1 for those not named.
        block: as for `StepPlanner`.

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
        block: int = 1,
    ) -> None:
        self._pool = pool
        self._limit = SlotLimit(max_running)
        self._prefill_chunk = prefill_chunk
        self._serial = itertools.count()
        self._live: dict[Sequence, None] = {}  # an ordered set
        self._queue = FairQueue(weights)
        self._shares = SlotShares(self._queue, self._limit)
        self._planner = StepPlanner(self._queue, self._shares, prefill_chunk, shared_chunk, block)
        self._next_deadline = math.inf
        self.step_seconds = 0.0
        self._unrecorded: list[Sequence] = []
        self.running: list[Sequence] = []

    @property
    def max_running(self) -> int:
        """Most sequences that run at once: as configured, or fewer for a while after a step ran out of memory."""
        return self._limit.slots

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def live(self) -> list[Sequence]:
        return list(self._live)

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence."""
        rank = sequence.request.arrived_at - PRIORITY_SECONDS * sequence.request.priority
        sequence.rank = (rank, next(self._serial))
        self._live[sequence] = None
        self._queue.enter(sequence)
        self._next_deadline = min(self._next_deadline, self._latest(sequence))

    def overdue(self, now: float) -> list[Sequence]:
        """Sequences that missed their deadline or cannot meet it any more; the caller finishes them."""
        if now < self._next_deadline:
            return []
        limits = [(self._latest(sequence), sequence) for sequence in self._live]
        self._next_deadline = min((limit for limit, _ in limits if limit > now), default=math.inf)
        return [sequence for limit, sequence in limits if limit <= now]

    def schedule(self, in_flight: Collection[Sequence] = (), microbatch: int | None = None) -> SchedulerOutput:
        """What the next step computes: finds memory for running sequences, admits waiting ones, splits the chunk.

        Args:
            in_flight: sequences of a step that is not finished; they take no part, but may be preempted.
            microbatch: decoding sequences that take part at most; None for any number.
        """
        self._record_prompts()
        if short := [sequence for sequence in self.running if self._pool.is_short(sequence)]:
            for sequence in self.running:
                self._pool.trim(sequence)
            self._find_memory(short)
        self._admit()
        if self._limit.passed(len(self.running), self.waiting):
            _log.info("no step ran out of memory lately; now %d sequences run at once", self.max_running)
        return self._planner.plan(self.running, in_flight, microbatch)

    def finish(self, sequence: Sequence, keep: bool = True) -> None:
        """Removes a sequence in whatever state; does nothing for a finished one.

        Args:
            keep: its keys and values are valid and may serve as a prefix for later sequences of the tenant.
        """
        if sequence.state is SequenceState.FINISHED:
            return
        if sequence.state is SequenceState.RUNNING:
            self._stop(sequence, keep)
        elif sequence.state is SequenceState.WAITING:
            self._leave_queue(sequence)
        if sequence.state is not SequenceState.PAUSED:
            self._queue.leave(sequence.request.tenant)
        sequence.state = SequenceState.FINISHED
        del self._live[sequence]

    def pause(self, sequence: Sequence) -> None:
        """Takes a sequence out of its slot or the queue until `resume`; it has no part in the fairness meanwhile.

        Its keys and values stay cached while the memory is not needed. Does nothing for one that is paused or finished.
        """
        if sequence.state is SequenceState.RUNNING:
            self._stop(sequence)
            sequence.committed = 0
        elif sequence.state is SequenceState.WAITING:
            self._leave_queue(sequence)
        else:
            return
        sequence.state = SequenceState.PAUSED
        sequence.stats.pauses += 1
        self._queue.leave(sequence.request.tenant)

    def resume(self, sequence: Sequence) -> None:
        """Queues a paused sequence at its rank. Does nothing for any other."""
        if sequence.state is SequenceState.PAUSED:
            sequence.state = SequenceState.WAITING
            self._queue.enter(sequence)

    def run_fewer(self) -> bool:
        """After a step that ran out of memory: fewer sequences run, for a while (`SlotLimit`).

        Returns False if only one does.
        """
        if not self._limit.out_of_memory(len(self.running)):
            return False
        for victim in [
            *itertools.islice(self._shares.preemption_order(), max(0, len(self.running) - self.max_running))
        ]:
            self._preempt(victim)
        return True

    def check(self, others: SequenceOf[Sequence] = ()) -> None:
        """Asserts that slots, memory, queues and states agree; `others` hold pages as well."""
        waiting = [*self._queue]
        paused = [s for s in self._live if s.state is SequenceState.PAUSED]
        assert len(self.running) <= self.max_running
        assert all(s.state is SequenceState.RUNNING for s in self.running)
        assert all(s.state is SequenceState.WAITING for s in waiting)
        assert all(s.committed == 0 for s in (*waiting, *paused))
        assert len(self.running) + len(waiting) + len(paused) == len(self._live)
        assert self._live.keys() == {*self.running, *waiting, *paused}
        assert not any(s.common_prefixes for s in (*self.running, *paused))
        assert {*self._unrecorded} <= {*self.running}
        self._queue.check([*self.running, *waiting])
        self._shares.check(self.running)
        self._pool.check([*self.running, *others], waiting)

    def _latest(self, sequence: Sequence) -> float:
        """The latest time for a running sequence to end, and for a waiting one to start its prefill."""
        if sequence.request.deadline is None:
            return math.inf
        if sequence.state is SequenceState.RUNNING:
            return sequence.request.deadline
        return sequence.request.deadline - self.step_seconds * math.ceil(sequence.length / self._prefill_chunk)

    def _record_prompts(self) -> None:
        """Makes what is computed of the prompts of running sequences findable."""
        for sequence in self._unrecorded:
            self._pool.record(sequence)
        self._unrecorded = [
            sequence for sequence in self._unrecorded if sequence.committed < sequence.request.prompt.size
        ]

    def _find_memory(self, short: SequenceOf[Sequence]) -> None:
        """Gives running sequences further pages. If there are too few, those that yield last get theirs first."""
        if self._pool.shortfall(short) > 0:
            for sequence in reversed([*self._shares.preemption_order()]):
                if sequence in short and sequence.state is SequenceState.RUNNING:
                    self._grow_or_preempt(sequence)
            return
        for sequence in short:
            self._pool.grow(sequence)

    def _grow_or_preempt(self, sequence: Sequence) -> None:
        """Gives a running sequence further pages; preempts those that yield before it if need be, or else itself."""
        if (missing := self._pool.shortfall([sequence])) > 0:
            before = itertools.takewhile(lambda other: other is not sequence, self._shares.preemption_order())
            for victim in self._pool.victims(before, missing) or [sequence]:
                self._preempt(victim)
        if sequence.state is SequenceState.RUNNING:
            self._pool.grow(sequence)

    def _stop(self, sequence: Sequence, keep: bool = True) -> None:
        """Takes the slot and the pages of a running sequence."""
        self.running.remove(sequence)
        self._shares.stopped(sequence)
        if sequence in self._unrecorded:
            self._unrecorded.remove(sequence)
        self._pool.close(sequence, keep)

    def _leave_queue(self, sequence: Sequence) -> None:
        self._queue.remove(sequence)
        self._pool.leave(sequence)
        sequence.common_prefixes.clear()

    def _preempt(self, sequence: Sequence) -> None:
        """Its keys and values stay cached while the memory is not needed."""
        self._stop(sequence)
        sequence.state = SequenceState.WAITING
        sequence.committed = 0
        sequence.stats.preemptions += 1
        self._queue.requeue(sequence)

    def _admit(self) -> None:
        """Fills free slots, and those that belong to tenants whose sequences wait.

        A sequence that is next and that memory does not suffice for holds up the others, or it would wait for ever.
        """
        while (admission := self._next()) is not None:
            sequence, victims = admission
            for victim in victims:
                self._preempt(victim)
            if not self._pool.open(sequence):
                return  # its cached prefix was in pages that were given up
            tenant = sequence.request.tenant
            self._leave_queue(sequence)
            if sequence.slot_generation == 0:
                self._queue.charge(tenant, sequence.length - sequence.committed)
                sequence.stats.cached_prompt_tokens = sequence.committed
            sequence.state = SequenceState.RUNNING
            sequence.slot_generation += 1
            self.running.append(sequence)
            self._shares.started(sequence)
            self._unrecorded.append(sequence)

    def _next(self) -> tuple[Sequence, list[Sequence]] | None:
        """The sequence to admit, and those that give way to it."""
        if not len(self._queue):
            return None
        free = len(self.running) < self.max_running
        with closing(self._shares.heads(free)) as heads:
            looked_at = 0
            for head in heads:
                if self._waits_for_prefix(head):
                    continue
                missing = self._pool.shortfall_of_waiting(head)
                if free and missing <= 0:
                    return head, []
                if (victims := self._pool.victims(self._shares.preemptible_for(head), missing)) is not None:
                    return head, victims
                looked_at += 1
                if free or looked_at == _MAX_LOOKED_AT:
                    return None
        return None

    def _waits_for_prefix(self, sequence: Sequence) -> bool:
        """Whether a running sequence is about to compute a prefix of this prompt, which can be shared then.

        The wait is no longer than computing that prefix would take. So samples of one prompt share its prefill.
        """
        if not self._pool.prefix_cache:
            return False
        in_prefill = [
            other
            for other in self._shares.running.get(sequence.request.tenant, ())
            if other.committed < other.request.prompt.size
        ]
        if not in_prefill:
            return False
        known, prompt = sequence.common_prefixes, sequence.request.prompt
        for other in in_prefill:
            if other not in known:
                known[other] = common_prefix(other.request.prompt, prompt)
        longest, page = max(map(known.__getitem__, in_prefill)), self._pool.page_size
        return longest >= page and longest >= self._pool.cached(sequence) + page
