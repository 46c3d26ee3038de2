"""The engine: sequences in, tokens out, one `step()` at a time. Knows nothing of gRPC, Redis or torch."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from draftwood_model_runner.draft_policy import DraftedAhead, DraftPolicy, Drafts, MicrobatchPolicy
from draftwood_model_runner.engine_config import EngineConfig
from draftwood_model_runner.errors import DeviceLostError, DeviceMemoryError, DraftwoodError, EngineStoppedError
from draftwood_model_runner.execution import (
    BegunStep,
    LiveSequences,
    allocate,
    check_fits,
    lay_out_following,
    lay_out_step,
    model_drafts,
)
from draftwood_model_runner.loading.model import LoadedModel
from draftwood_model_runner.output import Answer, StepOutput, VerifiedTree
from draftwood_model_runner.plain_decoding import DrafterTrial, OwnText, PlainDecoding, Redecoding
from draftwood_model_runner.request import Request, SamplingParams, StopParams
from draftwood_model_runner.runners.base import FollowedRunner, StepBatch
from draftwood_model_runner.runners.machine import processor_name
from draftwood_model_runner.sampling.grammar import background_threads
from draftwood_model_runner.sampling.token_sampler import forbid
from draftwood_model_runner.scheduling.scheduler import Scheduler, SchedulerOutput
from draftwood_model_runner.sequence import EngineCounts, KVUse, Sequence, SequenceState, StateUse
from draftwood_model_runner.step_measuring import known_step_times
from draftwood_strategies import create, strategy_names
from draftwood_strategies.arrays import Int32Array, segment_sizes
from draftwood_strategies.base import StepFeedback
from draftwood_strategies.draft_engine.engine import DraftSession
from draftwood_strategies.draft_engine.step_times import BLOCK
from draftwood_strategies.draft_engine.watchdog import Watchdog
from draftwood_strategies.drafting import NO_DRAFTS, Drafting
from draftwood_strategies.model_drafts import ModelStrategy
from draftwood_strategies.registry import offered
from draftwood_strategies.threads import usable_cpus

__all__ = ["Engine", "EngineConfig"]
_log = logging.getLogger(__name__)
_MASK_SECONDS = 0.001
"""How long a step without work waits for a mask; a request that arrives meanwhile waits as long."""
_WIDE = 512
"""Tokens of the largest step that is measured at the start on a GPU. From some hundred tokens on, its arithmetic takes
longer than reading the weights, and only measured times tell from how many (`MicrobatchPolicy`)."""

WARM_UP_TENANT = "\x00warm-up"
"""No caller can have this name."""
_WARM_UP_PROMPT, _WARM_UP_TOKENS = 8, 8
_WARM_UP_DRAFTS = (15, 31, 63, 127, 255)
"""Nodes of drafts, with each of which steps that begin ahead need kernels of other sizes."""
LEAST_AGREED = 0.15
"""Share of a target's tokens that must be among the few most probable ones of a model which drafts for it. Heads that
were trained for it and smaller models of its family reach 0.4 and more, heads of other models up to 0.03."""


class Engine:
    """Continuous batching over draft trees. One thread calls all methods.

    Args:
        watchdog: interrupts strategies that do not return; None for no limit.

    Attributes:
        counts: of all steps so far.
        model_drafts: the drafts of models beside the target, by the names of their strategies.

    Raises:
        InvalidValueError: the KV cache, as configured or as memory allows, cannot hold one full context, or the device
            has no memory for it.
    """

    def __init__(
        self, model: LoadedModel, config: EngineConfig = EngineConfig(), watchdog: Watchdog | None = None
    ) -> None:
        self.model = model
        self.config = config
        self._runner, self._pool, max_running = allocate(model, config)
        step_times = None
        if config.adaptive_budget:
            largest = max(1 + config.max_draft_nodes, _WIDE if self._runner.is_asynchronous else 0)
            machine = f"{usable_cpus()} of {processor_name()}"
            step_times = known_step_times(self._runner, model.max_context, largest, model.step_times_file, machine)
        chunk = config.prefill_chunk
        shared_chunk = chunk if self._runner.mixed_batches else config.shared_prefill_chunk
        block = BLOCK if step_times is not None and step_times.per_padding else 1
        self._scheduler = Scheduler(self._pool, max_running, chunk, shared_chunk, config.tenant_weights, block)
        self.model_drafts = model_drafts(model, self._runner, config)
        for drafts in self.model_drafts.values():
            if step_times is not None:
                drafts.measure(step_times, max_running)
        self._policy = DraftPolicy(
            model.vocab_size, self._runner.draft_limits, step_times, watchdog, [*self.model_drafts.values()]
        )
        self._microbatches = MicrobatchPolicy(step_times if self._runner.is_asynchronous else None)
        self._following: FollowedRunner | None = None
        if config.steps_ahead and isinstance(self._runner, FollowedRunner) and self._runner.follows:
            self._following = self._runner if self._pool.window is None else None
        self._in_flight: BegunStep | None = None
        self._live = LiveSequences(model, self._scheduler, self._policy)
        self._masking = background_threads(1, "mask")
        self._redecodings = 0
        self._redecoding: Redecoding | None = None
        self._own_text: OwnText | None = None
        self._closed = False
        self.counts = EngineCounts()

    @property
    def kv_use(self) -> KVUse:
        """Pages of KV memory now."""
        return self._pool.use

    @property
    def state_use(self) -> StateUse:
        """Memory of recurrent layers' states now."""
        return self._pool.state_use

    @property
    def drafting_failures(self) -> Counter[str]:
        """For each strategy, by name, how many sequences it was switched off for."""
        return self._policy.drafts.failures

    @property
    def running(self) -> int:
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        return self._scheduler.waiting

    @property
    def has_work(self) -> bool:
        return self.running + self.waiting > 0

    @property
    def idle(self) -> bool:
        return not self.has_work

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence.

        Raises:
            EngineStoppedError: the engine is closed.
            InvalidValueError: it does not fit the context or vocabulary of the model, or asks for too wide a draft.
        """
        if self._closed:
            raise EngineStoppedError("the engine is closed")
        check_fits(sequence, self.model, self.config)
        if sequence.request.deadline is not None:
            self._scheduler.step_seconds = self._policy.plain_step_seconds
        self._scheduler.add(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence without further output. Does nothing for one that has ended."""
        self._live.finish(sequence)

    def pause(self, sequence: Sequence) -> None:
        """Gives up the slot of a sequence, or its place in the queue, until `resume`; what it writes does not change.

        Its keys and values are computed again if the memory is needed meanwhile. A paused sequence is no work. Does
        nothing for one that is paused or has ended.
        """
        self._scheduler.pause(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Lets a paused sequence run again as soon as a slot is free; does nothing for any other."""
        self._scheduler.resume(sequence)

    def set_model_table(self, rows: Int32Array) -> None:
        """Gives strategies that take it a successor table that is no tenant's (`UsesModelTable`)."""
        self._policy.drafts.model_table = rows

    def own_text(self, tokens: int, cache: Path | None) -> OwnText:
        """What the model writes by itself, in steps that the caller makes while the engine has no work; its successor
        table is set for all tenants (`set_model_table`). `step` pauses it, so that its pages are free for what the
        engine runs. One at a time: it ends the one before.

        Args:
            tokens, cache: as for `OwnText`.
        """
        if self._own_text is not None:
            self._own_text.close()
        at_once = self._scheduler.max_running
        self._own_text = OwnText(self.model, self._runner, self._pool, at_once, tokens, cache, self.set_model_table)
        return self._own_text

    def redecode(self, answer: Answer) -> Redecoding:
        """Decodes an answer again without drafts, in steps that the caller makes while the engine has no work.

        One at a time: it ends the one before. `step` pauses it, so that its pages are free for what the engine runs.
        """
        if self._redecoding is not None:
            self._redecoding.close()
        self._redecodings += 1
        label = f"\x00redecoding {self._redecodings}"  # no tenant can have this name
        self._redecoding = Redecoding(self.model, self._runner, self._pool, answer, label)
        return self._redecoding

    @property
    def _idle_work(self) -> list[PlainDecoding]:
        """What is computed while the engine has no work, and gives way to what it runs."""
        return [work for work in (self._own_text, self._redecoding) if work is not None]

    def close(self) -> None:
        """Ends all sequences; the engine takes no more."""
        self._closed = True
        self._in_flight = None
        for work in self._idle_work:
            work.close()
        for sequence in self._scheduler.live:
            self._live.finish(sequence)
        self._masking.shutdown(wait=False, cancel_futures=True)

    def check(self) -> None:
        """Asserts that slots, KV pages and drafters are held by live sequences that have run, and by no others."""
        self._policy.models.check(self._scheduler.live)
        self._live.check([sequence for work in self._idle_work for sequence in work.with_pages])

    def step(self) -> list[StepOutput]:
        """Schedules, drafts, runs the model once, verifies, commits. Returns what was written, sequence by sequence.

        If it pays, the step that begins has half of the sequences, a microbatch, and stays in flight while that of the
        other half ends (`MicrobatchPolicy`). With `EngineConfig.steps_ahead` a step of all sequences stays in flight
        until the next one has begun, so that the device does not wait for the host, and tokens are returned one step
        late. If a sequence was preempted or cancelled before its step ended, what it wrote in that step is dropped.

        An error in the model ends the sequences of this step with it; one in the part of a single sequence, or its
        deadline, ends that one. If the device's memory does not suffice, half of the sequences wait for a while.

        Raises:
            DeviceLostError: the device computes nothing more for this process.
        """
        started = time.perf_counter()
        for work in self._idle_work:
            work.pause()
        outputs = self._live.expire(started)
        earlier, self._in_flight = self._in_flight, None
        if earlier is not None and (ahead := self._begin_ahead(earlier, started)) is not None:
            self._end_step(earlier, outputs, ahead.room)
            ahead = ahead._replace(started=time.perf_counter())  # its time counts from where the other's ends
            if self.has_work:
                self._leave_in_flight(ahead)
            else:
                self._end_step(ahead, outputs)
            self.counts = self.counts.plus(EngineCounts(step_seconds=time.perf_counter() - started, steps_ahead=1))
            return outputs
        microbatch = None if self._follow_device() else self._microbatches.microbatch(self.running)
        scheduled = self._scheduler.schedule(() if earlier is None else earlier.sequences, microbatch)
        begun = self._begin(scheduled, started, outputs)
        if earlier is not None:
            self._end_step(earlier, outputs)
        if begun is not None and self._may_go_on(begun):
            self._leave_in_flight(begun)
        elif begun is not None and microbatch is not None and begun.on_device.can_overlap:
            self._in_flight = begun
            self.counts = self.counts.plus(EngineCounts(microbatches=1))
        elif begun is not None:
            self._end_step(begun, outputs)
        elif earlier is None:
            self._await_mask()
            return outputs
        self.counts = self.counts.plus(EngineCounts(step_seconds=time.perf_counter() - started))
        return outputs

    def _begin(self, output: SchedulerOutput, started: float, outputs: list[StepOutput]) -> BegunStep | None:
        """Begins a step; None if there is nothing to do, or if the step failed: then `outputs` has the errors."""
        drafts, batch = self._laid_out(output, started, outputs)
        scheduled = drafts.scheduled
        if batch is None:
            return None
        batch = self._without_unread_features(batch, [work.sequence for work in scheduled])
        try:
            on_device = self._runner.begin(batch, self._policy.top_k(drafts), self._live.samplers(scheduled))
        except DeviceLostError:
            raise
        except Exception as error:
            outputs += self._failed([work.sequence for work in scheduled], error)
            return None
        generations = [work.sequence.slot_generation for work in scheduled]
        return BegunStep(batch, scheduled, generations, on_device, started, time.perf_counter() - started)

    def _without_unread_features(self, batch: StepBatch, sequences: list[Sequence]) -> StepBatch:
        """The batch of a step of these; features are asked for only if a model beside the target reads them."""
        if not self.model_drafts or self._policy.models.reads_features(sequences):
            return batch
        return replace(batch, reads_features=False)

    def _may_go_on(self, step: BegunStep) -> bool:
        """Whether the next step may begin while this one is in flight: it has all running sequences, which decode, no
        other can join them, and the device needs nothing of what the host learns."""
        if self._following is None or not step.only_decodes or not step.on_device.can_overlap:
            return False
        if self.waiting and self.running < self._scheduler.max_running:
            return False
        running = self._scheduler.running
        writes_on = any(sequence.longest - sequence.length > 1 for sequence in running)
        return writes_on and step.sequences >= {*running} and self._follow_device()

    def _follow_device(self) -> bool:
        """Whether steps may begin ahead, and for the next step of the running sequences the host has nothing to choose
        and to draft."""
        if self._following is None:
            return False
        running = [sequence for sequence in self._scheduler.running if sequence.writer is not None]
        return all(sequence.writer.sampler.follows_device for sequence in running) and self._policy.follows(running)

    def _leave_in_flight(self, step: BegunStep) -> None:
        for work, tokens in zip(step.scheduled, step.most_written, strict=True):
            work.sequence.in_flight = tokens
        self._in_flight = step

    def _begin_ahead(self, earlier: BegunStep, started: float) -> BegunStep | None:
        """Begins a step that goes on with what one in flight writes; None if it cannot, so that the other must end
        first."""
        if self._following is None or not self._may_go_on(earlier):
            return None
        output = self._scheduler.schedule()
        rows = {earlier.scheduled[row].sequence: row for row in earlier.valid_rows}
        # Those that write their last token in the step in flight end with it.
        scheduled = [work for work in output.scheduled if work.sequence.longest - work.sequence.length > 1]
        if not scheduled or any(work.tokens != 1 or work.sequence not in rows for work in scheduled):
            return None
        sequences = [work.sequence for work in scheduled]
        try:
            drafts = self._policy.follow(sequences, [rows[sequence] for sequence in sequences])
            batch = lay_out_following(sequences, drafts.sizes, self._pool)
            batch = self._without_unread_features(batch, sequences)
            samplers = self._live.samplers(scheduled)
            on_device = self._following.follow(earlier.on_device, drafts.following, batch, samplers)
        except DeviceLostError:
            raise
        except DeviceMemoryError as error:
            _log.info("a step does not begin ahead: %s", error)
            return None
        except Exception as error:
            _log.error("from now on no step begins ahead", exc_info=error)
            self._following = None
            return None
        room = {ask.session: int(drafts.sizes[ask.row]) - 1 for ask in drafts.asks}
        generations = [sequence.slot_generation for sequence in sequences]
        host_seconds = time.perf_counter() - started
        return BegunStep(batch, scheduled, generations, on_device, started, host_seconds, room)

    def _laid_out(
        self, output: SchedulerOutput, started: float, outputs: list[StepOutput]
    ) -> tuple[Drafts, StepBatch | None]:
        """What takes part in a step with its drafts, and the batch; None if nothing takes part. If drafting fails, its
        sequences go on without drafts; if it was not drafting, they end, and `outputs` has their errors."""
        outputs += self._live.start([work.sequence for work in output.scheduled], started)
        scheduled = [work for work in output.scheduled if work.sequence.state is not SequenceState.FINISHED]
        try:
            drafts = self._policy.propose(scheduled, output.prompts_wait and not self._runner.mixed_batches)
            if not drafts.scheduled:
                return drafts, None
            return drafts, lay_out_step(drafts, self._pool)
        except Exception as error:
            self._policy.give_up([work.sequence for work in scheduled], error)
        drafts = Drafts.none(scheduled)
        try:
            return drafts, lay_out_step(drafts, self._pool)
        except Exception as error:
            outputs += self._failed([work.sequence for work in scheduled], error)
            return drafts, None

    def _end_step(self, step: BegunStep, outputs: list[StepOutput], learned: Collection[DraftSession] = ()) -> None:
        """Waits for a step, and adds what its sequences write to `outputs`.

        Args:
            learned: whose devices have learned it: those that a step that follows it drafts for.
        """
        for work in step.scheduled:
            work.sequence.in_flight = 0
        try:
            feedback, seconds = step.on_device.wait()
            began = time.perf_counter()
            self._policy.observe_step(step.batch, seconds)
            written = self._verify(step, feedback, outputs)
        except DeviceLostError:
            raise
        except Exception as error:
            outputs += self._failed([step.scheduled[row].sequence for row in step.valid_rows], error)
            return
        try:
            ahead = DraftedAhead(step.room, step.on_device.scores) if step.room else None
            self._policy.observe(written, feedback, seconds, learned, ahead)
        except Exception as error:
            self._policy.give_up([output.sequence for output in written.values()], error)
        outputs += written.values()
        for output in written.values():
            if output.finish:
                self._live.finish(output.sequence)
            elif output.sequence.grammar is not None:
                output.sequence.grammar.prepare(self._masking)
        ended = time.perf_counter()
        if step.only_decodes:
            self._microbatches.observe(step.batch, step.host_seconds + ended - began)
        self.counts = self.counts.plus(EngineCounts(steps=1, model_seconds=seconds))
        for sequence, _ in step.scheduled:
            sequence.stats.model_seconds += seconds
            sequence.stats.step_seconds += ended - step.started

    def _verify(self, step: BegunStep, feedback: StepFeedback, outputs: list[StepOutput]) -> dict[int, StepOutput]:
        """What each sequence writes, by batch row. One that fails is ended, and its last output added to `outputs`."""
        valid = [(row, step.scheduled[row]) for row in step.valid_rows]
        writing = [(row, work.sequence) for row, work in valid if work.reaches_end]
        paths = step.on_device.verify([row for row, _ in writing])
        positions = {row: work.sequence.committed for row, work in valid}
        for _, (sequence, tokens) in valid:
            sequence.committed += tokens
        drafted, written = (segment_sizes(feedback.offsets) - 1).tolist(), dict[int, StepOutput]()
        for (row, sequence), path in zip(writing, paths, strict=True):
            output = self._live.write(sequence, path, drafted[row])
            if isinstance(output, StepOutput):
                if sequence.request.draft_trees:
                    output.tree = VerifiedTree.of(feedback, row, path.nodes[: output.drafted.count(True)])
                written[row] = output
                continue
            if not isinstance(output, DraftwoodError):
                _log.error("request %r failed in verification", sequence.request.request_id, exc_info=output)
            outputs.append(self._live.fail(sequence, output))
        if self.model_drafts:
            nodes = {row: path.nodes for (row, _), path in zip(writing, paths, strict=True)}
            computed = [
                step.computed(row, position, nodes.get(row, ()))
                for row, position in positions.items()
                if step.scheduled[row].sequence.state is SequenceState.RUNNING
            ]
            self._policy.models.observe(computed, step.on_device.features)
        return written

    def _await_mask(self) -> None:
        """Waits a moment for a mask if the running sequences wait for nothing else."""
        grammars = [sequence.grammar for sequence in self._scheduler.running if sequence.grammar is not None]
        if pending := [grammar.pending for grammar in grammars if grammar.pending is not None]:
            wait(pending, _MASK_SECONDS, FIRST_COMPLETED)

    def _failed(self, sequences: list[Sequence], cause: Exception) -> list[StepOutput]:
        """What becomes of the sequences of a step that failed: fewer run for a while, or they end."""
        if isinstance(cause, DeviceMemoryError) and self._scheduler.run_fewer():
            _log.warning("%s; %d sequences run at once for now", cause, self._scheduler.max_running)
            return []
        return self._live.fail_step(sequences, cause)


@contextmanager
def model_strategies(engine: Engine) -> Iterator[None]:
    """In it there are strategies that draft by the models beside the engine's, see `registry.offered`."""
    with ExitStack() as stack:
        for name, drafts in engine.model_drafts.items():
            stack.enter_context(offered(name, partial(ModelStrategy, drafts)))
        yield


def try_drafters(engine: Engine) -> dict[str, float]:
    """The share of the tokens of a few answers of the engine's model that were among the most probable ones of each
    model beside it, by the name of its strategy; see `LEAST_AGREED`. To be called before the engine has work."""
    if not engine.model_drafts:
        return {}
    at_once = engine._scheduler.max_running
    trial = DrafterTrial(engine.model, engine._runner, engine._pool, at_once, engine.model_drafts)
    while not trial.done:
        trial.step()
    return trial.shares


def warm_up(engine: Engine) -> None:
    """Writes a few tokens with every registered strategy, all in one batch, a few that are sampled, and a few in steps
    that begin ahead.

    Without it the first request after an installation waits some seconds for compilers, and its drafter is blamed for
    it. Compiled functions are kept on disk, so that later starts only load them.
    """
    prompt = np.arange(_WARM_UP_PROMPT, dtype=np.int32) % engine.model.vocab_size
    new, most = min(_WARM_UP_TOKENS, engine.model.max_context - prompt.size), engine.config.max_draft_nodes

    def add(name: str, nodes: int, tokens: int = new, **sampling: Any) -> None:
        try:
            strategy = create(name)
        except Exception:
            _log.exception("strategy %r cannot be created", name)
            return
        request = Request(
            request_id=f"warm-up-{name}",
            prompt=prompt,
            stop=StopParams(max_tokens=tokens, ignore_eos=True),
            sampling=SamplingParams(**sampling),
            tenant=WARM_UP_TENANT,
            drafting=Drafting(name, max_nodes=nodes),
        )
        engine.add(Sequence(request, strategy))

    def run() -> None:
        while engine.has_work:
            engine.step()

    for name in strategy_names():
        add(name, most)
    add(NO_DRAFTS, 0, tokens=1, temperature=0.7, top_k=20, top_p=0.9)
    forbid(bytes(4), np.zeros(1, np.float32))
    run()
    if engine.config.steps_ahead:
        for nodes in sorted({min(nodes, most) for nodes in _WARM_UP_DRAFTS}):
            add("trie", nodes)
            run()
