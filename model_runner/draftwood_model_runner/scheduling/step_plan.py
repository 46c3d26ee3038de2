"""What a step computes: how many tokens of which running sequences. No torch."""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from draftwood_model_runner.scheduling.fair_queue import FairQueue, Rank
from draftwood_model_runner.scheduling.slot_shares import SlotShares
from draftwood_model_runner.sequence import Sequence

_MOST_SKIPPED = 3
"""The sequences of a tenant above its share skip at most this many steps in a row for the first tokens of others."""

_DECODE_COST = 2
"""What a decoding step counts in prompt tokens, for fairness between tenants: the ratio of the VTC paper."""


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
        rank: Callable[[Sequence], Rank],
        prefill_chunk: int,
        shared_chunk: int,
        block: int = 1,
    ) -> None:
        self._queue = queue
        self._shares = shares
        self._rank = rank
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
            for sequence in sorted(sequences, key=self._rank):
                tokens = min(pending[sequence], shares[tenant])
                cut = cut or tokens < pending[sequence]
                pending[sequence] = tokens
                shares[tenant] -= tokens
        return cut

    def _participating(self, running: SequenceOf[Sequence]) -> list[Sequence]:
        """The ready sequences; if the step ends a prompt, without those of other tenants above their share."""
        ready = [one for one in running if one.ready]
        chunk = self._shared_chunk
        if ending := [one for one in ready if not one.output and one.length - one.committed <= chunk]:
            above = self._shares.over_share()
            ends = any(one.request.tenant not in above for one in ending)
            if above and ends and self._skipped < _MOST_SKIPPED:
                self._skipped += 1
                return [one for one in ready if one.request.tenant not in above]
        self._skipped = 0
        return ready
