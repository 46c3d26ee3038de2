"""vLLM behind the interface of Draftwood's own engine: sequences in, what steps write out. For one thread.

Who runs next is decided here, between tenants by weight: vLLM gets no more requests than it runs at once, so that its
own queue is empty.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

from draftwood_model_runner.errors import EngineStoppedError, InvalidInputError, ModelError
from draftwood_model_runner.output import Answer, Finish, FinishReason, OutputText, StepOutput
from draftwood_model_runner.request import Request
from draftwood_model_runner.scheduling.fair_queue import FairQueue, SlotLimit, SlotShares
from draftwood_model_runner.scheduling.scheduler import PRIORITY_SECONDS
from draftwood_model_runner.sequence import EngineCounts, KVUse, Sequence, SequenceState, StateUse
from draftwood_service.engine.vllm.requests import CoreOutput, VllmRedecoding

if TYPE_CHECKING:
    from draftwood_service.engine.vllm.core import VllmCore
    from draftwood_service.engine.vllm.records import DraftRecords


class VllmEngine:
    """See the module.

    Args:
        slots: requests that vLLM runs at once.
        pages: of its KV cache.
        weights: of tenants, read when a request begins to wait; 1 for those not named.
        params: vLLM's arguments for a request.
        text: turns the tokens of an answer into text, and finds its end.
        records: what the plug-in did for each request.
    """

    def __init__(
        self,
        core: VllmCore,
        *,
        slots: int,
        pages: int,
        weights: Mapping[str, float],
        params: Callable[[Request], dict[str, Any]],
        text: Callable[[Request], OutputText],
        records: DraftRecords,
    ) -> None:
        self._core = core
        self._slots = slots
        self._pages = pages
        self._params = params
        self._text = text
        self._records = records
        self._live: dict[Sequence, None] = {}  # an ordered set
        self._queue = FairQueue(weights)
        self._shares = SlotShares(self._queue, SlotLimit(slots))
        self._serial = itertools.count()
        self._running: dict[str, tuple[Sequence, OutputText]] = {}
        self._ids: dict[Sequence, str] = {}
        self._held = 0.0
        self._redecoding: VllmRedecoding | None = None
        self._steps, self._step_seconds, self._step_began = 0, 0.0, 0.0
        self._closed = False

    @property
    def has_work(self) -> bool:
        """There is something to do now: a step of vLLM has ended."""
        return self._core.has_step

    @property
    def idle(self) -> bool:
        """No sequence runs or waits."""
        return not self._live

    @property
    def counts(self) -> EngineCounts:
        """vLLM does not say how long the model's part of a step takes."""
        return EngineCounts(self._steps, self._step_seconds)

    def forget_counts(self) -> None:
        """Counts steps from now on."""
        self._steps, self._step_seconds = 0, 0.0

    @property
    def kv_use(self) -> KVUse:
        return KVUse(self._pages, round(self._held * self._pages), 0)

    @property
    def state_use(self) -> StateUse:
        """vLLM keeps states in its KV cache."""
        return StateUse()

    def add(self, sequence: Sequence) -> None:
        if self._closed:
            raise EngineStoppedError("the engine is closed")
        request = sequence.request
        sequence.rank = (request.arrived_at - PRIORITY_SECONDS * request.priority, next(self._serial))
        self._live[sequence] = None
        self._queue.enter(sequence)
        if self._redecoding is not None:
            self._redecoding.pause()
        self._admit()

    def cancel(self, sequence: Sequence) -> None:
        if sequence.state is not SequenceState.FINISHED:
            self._finish(sequence, abort=True)
            self._admit()

    def pause(self, sequence: Sequence) -> None:
        """Does nothing: vLLM goes on, up to the end of the answer."""

    def resume(self, sequence: Sequence) -> None:
        """Does nothing, see `pause`."""

    def redecode(self, answer: Answer) -> VllmRedecoding:
        """Decodes an answer again without drafts while no sequence runs. One at a time."""
        if self._redecoding is not None:
            self._redecoding.close()
        self._redecoding = VllmRedecoding(
            answer, self._begin, lambda request_id: self._core.abort([request_id]), self._text
        )
        return self._redecoding

    def step(self) -> list[StepOutput]:
        """The outputs of vLLM's oldest unread step. Raises EngineStoppedError: vLLM has died."""
        step = self._core.take()
        self._records.read(self._running)
        now = time.perf_counter()
        seconds, self._step_began = now - self._step_began, now
        self._steps += 1
        self._step_seconds += seconds
        if step.kv_use is not None:
            self._held = step.kv_use
        outputs = []
        for output in step.outputs:
            if (running := self._running.get(output.id)) is not None:
                running[0].stats.step_seconds += seconds
                outputs.append(self._written(*running, output))
            elif self._redecoding is not None and output.id == self._redecoding.id:
                self._redecoding.take(output.token_ids, output.logprobs, output.ended)
        self._admit()
        return outputs

    def close(self) -> None:
        """Ends all sequences, and vLLM."""
        self._closed = True
        self._redecoding = None
        for sequence in [*self._live]:
            self._finish(sequence)
        self._core.close()

    def _admit(self) -> None:
        """Gives free slots to waiting sequences, first to those of tenants that lack slots, by weight."""
        while len(self._running) < self._slots and len(self._queue):
            with closing(self._shares.heads(free=True)) as heads:
                sequence = next(heads)
            self._queue.remove(sequence)
            sequence.state = SequenceState.RUNNING
            sequence.slot_generation += 1
            self._shares.started(sequence)
            self._queue.charge(sequence.request.tenant, int(sequence.request.prompt.size))
            if not self._running:
                self._step_began = time.perf_counter()
            request_id = self._ids[sequence] = self._begin(sequence.request)
            self._running[request_id] = sequence, self._text(sequence.request)

    def _begin(self, request: Request) -> str:
        """Gives a request to vLLM; returns its id there."""
        request_id = str(next(self._serial))
        self._core.add(request_id, request.prompt.tolist(), self._params(request), request.tenant)
        return request_id

    def _finish(self, sequence: Sequence, abort: bool = False) -> None:
        """Takes a sequence out, in whatever state.

        Args:
            abort: vLLM still has it, if it runs.
        """
        if sequence.state is SequenceState.RUNNING:
            self._shares.stopped(sequence)
            request_id = self._ids.pop(sequence)
            del self._running[request_id]
            self._records.end(request_id)
            if abort:
                self._core.abort([request_id])
        else:
            self._queue.remove(sequence)
        sequence.state = SequenceState.FINISHED
        sequence.stats.finished_at = time.perf_counter()
        self._queue.leave(sequence.request.tenant)
        del self._live[sequence]

    def _written(self, sequence: Sequence, text: OutputText, output: CoreOutput) -> StepOutput:
        """A step's output for a sequence, up to where its answer ends."""
        stats = sequence.stats
        stats.first_scheduled_at = stats.first_scheduled_at or output.began_at or time.perf_counter()
        stats.preemptions += output.preemptions
        if output.cached_prompt_tokens is not None:
            stats.cached_prompt_tokens = output.cached_prompt_tokens
        texts, finish = text.write(output.token_ids)
        tokens = output.token_ids[: len(texts)]
        if tokens:
            # The last token of a step is the model's own; tokens behind the answer's end are dropped.
            accepted = min(len(output.token_ids) - 1, len(tokens))
            stats.record_step(self._records.drafted(output.id, sequence), accepted, time.perf_counter())
            sequence.output += tokens
            self._queue.charge(sequence.request.tenant, len(tokens))
        if output.draft_tokens is not None:
            stats.draft_tokens = output.draft_tokens
        if finish is None and output.ended:
            finish = _unexpected(sequence.request, output, texts, text)
        if finish is not None:
            self._finish(sequence, abort=not output.ended)
        drafted = [number < len(output.token_ids) - 1 for number in range(len(tokens))]
        return StepOutput(sequence, tokens, texts, drafted, finish, output.logprobs[: len(tokens)])


def _unexpected(request: Request, output: CoreOutput, texts: list[str], text: OutputText) -> Finish:
    """vLLM ended an answer where Draftwood's rules do not."""
    if output.ended == "error" and request.format is not None:
        # Its compiler or its matcher gave up, which has smaller bounds than ours.
        problem = "vLLM cannot follow this format; a smaller or simpler one may do"
        return Finish(FinishReason.ERROR, error=InvalidInputError("format", None, problem))
    if output.ended not in ("stop", "length"):
        return Finish(FinishReason.ERROR, error=ModelError(f"vLLM ended the request: {output.ended}"))
    if texts:
        texts[-1] += text.rest()
    return Finish(FinishReason.STOP if output.ended == "stop" else FinishReason.LENGTH)
