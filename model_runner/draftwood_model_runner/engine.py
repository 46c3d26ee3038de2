"""The engine: sequences in, tokens out, one `step()` at a time. Knows nothing of gRPC, Redis or torch."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from concurrent.futures import FIRST_COMPLETED, wait
from typing import NamedTuple

import numpy as np

from draftwood_model_runner.answer import Answer
from draftwood_model_runner.begun_step import BegunStep, Computed
from draftwood_model_runner.drafting.draft_policy import Draft, DraftPolicy, Outcome
from draftwood_model_runner.drafting.overlap import Overlap
from draftwood_model_runner.drafting.step_measuring import measure_step_times
from draftwood_model_runner.drafting.watchdog import Watchdog
from draftwood_model_runner.engine_config import EngineConfig
from draftwood_model_runner.errors import (
    DeadlineError,
    DeviceLostError,
    DeviceMemoryError,
    DraftwoodError,
    EngineStoppedError,
    InvalidValueError,
    ModelError,
)
from draftwood_model_runner.loading.model import LoadedModel
from draftwood_model_runner.output import StepOutput, VerifiedTree
from draftwood_model_runner.redecoding import Redecoding
from draftwood_model_runner.runners.base import KVMoves, OverlappingRunner, Predictions, StepBatch, StepInFlight
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.runners.choices import ON_HOST, Choices, ScoreRules
from draftwood_model_runner.sampling.background import background_threads
from draftwood_model_runner.sampling.output_text import OutputText
from draftwood_model_runner.sampling.sequence_writer import AcceptedPath, SequenceWriter
from draftwood_model_runner.sampling.token_chooser import TokenChooser
from draftwood_model_runner.scheduling.kv_pool import KVPool, KVUse
from draftwood_model_runner.scheduling.scheduler import Plan, Scheduler, Work
from draftwood_model_runner.sequence import Sequence, SequenceState
from draftwood_model_runner.statistics import EngineCounts
from draftwood_strategies import Feedback
from draftwood_strategies.draft import Int32Array

__all__ = ["Engine", "EngineConfig"]

_log = logging.getLogger(__name__)


_MASK_SECONDS = 0.001
"""How long a step without work waits for a mask: what arrives meanwhile waits as long. Not tuned."""


_WIDE = 512
"""Tokens of a step that is measured at the start on a GPU, whose arithmetic takes longer than reading the weights from
some hundred tokens on: only measured times tell where (`Overlap`). Not tuned."""


class _Verified(NamedTuple):
    """What a sequence writes in the step.

    Attributes:
        committed: tokens whose keys and values are computed, before those of the path.
        kept: the runner has moved keys and values of the path.
    """

    sequence: Sequence
    committed: int
    kept: bool
    path: AcceptedPath
    feedback: Feedback


class Engine:
    """Continuous batching over draft trees. One thread calls all methods.

    Args:
        watchdog: interrupts strategies that do not return; None for no limit.

    Raises:
        InvalidValueError: the KV cache, as configured or as memory allows, cannot hold one full context, or the device
            has no memory for it.
    """

    def __init__(
        self, model: LoadedModel, config: EngineConfig = EngineConfig(), watchdog: Watchdog | None = None
    ) -> None:
        self.model = model
        self.config = config
        full = model.max_context + config.max_draft_nodes
        capacity = config.kv_cache_tokens
        if capacity is None:
            capacity = model.factory.default_kv_tokens(full, config.max_running)
        if capacity < full:
            raise InvalidValueError("kv_cache_tokens", capacity, f"one full context with its drafts needs {full}")
        self._runner = model.factory.runner(capacity, config.threads)
        self._pool = KVPool(self._runner.pages, self._runner.page_size, config.prefix_cache)
        rides_along = self._runner.rides_along
        shared_chunk = config.prefill_chunk if rides_along else config.shared_prefill_chunk
        self._scheduler = Scheduler(
            self._pool, config.max_running, config.prefill_chunk, shared_chunk, config.tenant_weights
        )
        self._overlapping = self._runner if isinstance(self._runner, OverlappingRunner) else None
        step_times = None
        if config.adaptive_budget:
            largest = max(1 + config.max_draft_nodes, 0 if self._overlapping is None else _WIDE)
            step_times = measure_step_times(self._runner, model.max_context, largest)
        self._policy = DraftPolicy(model.vocab_size, self._runner.draft_limits, step_times, watchdog)
        self._overlap = Overlap(None if self._overlapping is None else step_times)
        self._in_flight: BegunStep | None = None
        self._writers: dict[Sequence, SequenceWriter] = {}
        self._masking = background_threads(1, "mask")
        self._redecodings = 0
        self._redecoding: Redecoding | None = None
        self._closed = False
        self._steps, self._step_seconds, self._model_seconds, self._halves = 0, 0.0, 0.0, 0

    @property
    def counts(self) -> EngineCounts:
        """Of all steps so far."""
        return EngineCounts(self._steps, self._step_seconds, self._model_seconds, self._halves)

    @property
    def kv_use(self) -> KVUse:
        """Pages of KV memory now."""
        return self._pool.use

    @property
    def drafting_failures(self) -> Counter[str]:
        """For each strategy, by name, how many sequences it was switched off for."""
        return self._policy.failures

    @property
    def running(self) -> int:
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        return self._scheduler.waiting

    @property
    def has_work(self) -> bool:
        return self.running + self.waiting > 0

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence.

        Raises:
            EngineStoppedError: the engine is closed.
            InvalidValueError: it does not fit the context or vocabulary of the model, or asks for too wide a draft.
        """
        if self._closed:
            raise EngineStoppedError("the engine is closed")
        request, limit, vocab = sequence.request, self.model.max_context, self.model.vocab_size
        if sequence.longest > limit:
            raise InvalidValueError(
                "prompt", sequence.longest, f"prompt and max_tokens together are at most {limit} tokens"
            )
        if not 0 <= int(request.prompt.min()) <= int(request.prompt.max()) < vocab:
            raise InvalidValueError("prompt", request.prompt, f"token ids lie in [0, {vocab})")
        most = self.config.max_draft_nodes
        if not 0 <= request.max_draft_nodes <= most:
            raise InvalidValueError("max_draft_nodes", request.max_draft_nodes, f"it must lie in [0, {most}]")
        if request.deadline is not None:
            self._scheduler.step_seconds = self._policy.plain_step_seconds
        self._scheduler.add(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence without further output. Does nothing for one that has ended."""
        if sequence.state is not SequenceState.FINISHED:
            self._finish(sequence)

    def pause(self, sequence: Sequence) -> None:
        """Gives up the slot of a sequence, or its place in the queue, until `resume`; what it writes does not change.

        Its keys and values are computed again if the memory is needed meanwhile. A paused sequence is no work. Does
        nothing for one that is paused or has ended.
        """
        self._scheduler.pause(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Lets a paused sequence run again as soon as a slot is free; does nothing for any other."""
        self._scheduler.resume(sequence)

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

    def close(self) -> None:
        """Ends all sequences; the engine takes no more."""
        self._closed = True
        self._in_flight = None
        if self._redecoding is not None:
            self._redecoding.close()
        for sequence in self._scheduler.live:
            self._finish(sequence)
        self._masking.shutdown(wait=False, cancel_futures=True)

    def check(self) -> None:
        """Asserts that slots, KV pages and drafters are held by live sequences that have run, and by no others."""
        redecoding = self._redecoding
        self._scheduler.check([redecoding.sequence] if redecoding is not None and redecoding.has_pages else [])
        assert self._writers.keys() == self._policy.sequences
        assert self._writers.keys() <= {*self._scheduler.live}

    def step(self) -> list[StepOutput]:
        """Schedules, drafts, runs the model once, verifies, commits. Returns what was written, sequence by sequence.

        Where it pays, the step that begins has half of the sequences and stays in flight while that of the other half
        ends (`Overlap`). What a sequence wrote in a step that ends after it was preempted or cancelled is dropped.

        An error in the model ends the sequences of this step with it; one in the part of a single sequence, or its
        deadline, ends that one. If the device's memory does not suffice, half of the sequences wait from then on.

        Raises:
            DeviceLostError: the device computes nothing more for this process.
        """
        started = time.perf_counter()
        if self._redecoding is not None:
            self._redecoding.pause()
        outputs = self._expire(started)
        earlier, self._in_flight = self._in_flight, None
        most = self._overlap.most(self.running)
        plan = self._schedule(started, () if earlier is None else earlier.sequences, most)
        begun = self._begin(plan, started, outputs)
        if earlier is not None:
            self._end_step(earlier, outputs)
        if begun is not None and most is not None and begun.can_overlap:
            self._in_flight = begun
            self._halves += 1
        elif begun is not None:
            self._end_step(begun, outputs)
        elif earlier is None:
            self._await_mask()
            return outputs
        self._step_seconds += time.perf_counter() - started
        return outputs

    def _begin(self, plan: Plan, started: float, outputs: list[StepOutput]) -> BegunStep | None:
        """Begins the step of a plan; None if there is nothing to do, or the step failed, which `outputs` tells then."""
        stand_back = plan.prompts_wait and not self._runner.rides_along
        drafts = self._policy.propose(plan.work, stand_back)
        if not drafts:
            return None
        batch = self._lay_out(drafts)
        try:
            choices = self._choices(batch, drafts) if self._runner.chooses else None
            begun = self._hand_over(batch, drafts, choices)
        except DeviceLostError:
            raise
        except Exception as error:
            outputs += self._failed(drafts, error)
            return None
        kept = None if choices is None else choices.kinds != ON_HOST
        runs = [draft.work.sequence.runs for draft in drafts]
        return BegunStep(batch, drafts, runs, kept, begun, started, time.perf_counter() - started)

    def _end_step(self, step: BegunStep, outputs: list[StepOutput]) -> None:
        """Waits for a step, and adds what its sequences write to `outputs`."""
        try:
            predictions, seconds = step.on_device.wait()
            began = time.perf_counter()
            self._policy.observe_step(step.batch, seconds)
            verified = self._verify(step, predictions, outputs)
            self._keep(verified)
        except DeviceLostError:
            raise
        except Exception as error:
            outputs += self._failed([draft for row, draft in enumerate(step.drafts) if step.is_valid(row)], error)
            return
        outputs += [self._commit(one, seconds, len(step.drafts)) for one in verified]
        ended = time.perf_counter()
        if step.only_decodes:
            self._overlap.observe(step.batch, step.host_seconds + ended - began)
        self._steps += 1
        self._model_seconds += seconds
        for draft in step.drafts:
            draft.work.sequence.stats.model_seconds += seconds
            draft.work.sequence.stats.step_seconds += ended - step.started

    def _failed(self, drafts: SequenceOf[Draft], error: Exception) -> list[StepOutput]:
        """What becomes of the sequences of a step that failed: fewer run from now on, or they end."""
        if isinstance(error, DeviceMemoryError) and self._scheduler.run_fewer():
            _log.warning("%s; from now on %d sequences run at once", error, self._scheduler.max_running)
            return []
        return self._fail(drafts, error)

    def _await_mask(self) -> None:
        """Waits a moment for a mask if the running sequences wait for nothing else."""
        grammars = [sequence.grammar for sequence in self._scheduler.running if sequence.grammar is not None]
        if pending := [grammar.pending for grammar in grammars if grammar.pending is not None]:
            wait(pending, _MASK_SECONDS, FIRST_COMPLETED)

    def _expire(self, now: float) -> list[StepOutput]:
        """Ends the sequences that are too late."""

        def late(sequence: Sequence) -> Exception:
            assert sequence.request.deadline is not None
            return DeadlineError(now - sequence.request.deadline)

        return [self._end(sequence, late(sequence)) for sequence in self._scheduler.overdue(now)]

    def _schedule(self, now: float, in_flight: Collection[Sequence], most: int | None) -> Plan:
        """The plan of the step; its sequences get what they need to draft and to write."""
        plan = self._scheduler.schedule(in_flight, most)
        for work in plan.work:
            if work.sequence not in self._writers:
                self._start(work.sequence, now)
        return plan

    def _start(self, sequence: Sequence, now: float) -> None:
        request, eos = sequence.request, self.model.eos_token_ids
        sequence.stats.first_scheduled_at = now
        self._policy.start(sequence)
        decoder = self.model.tokenizer.stream(request.prompt, request.include_special_tokens)
        chooser = TokenChooser(sequence, eos, self.model.vocab_size, self.model.defaults.constraints)
        self._writers[sequence] = SequenceWriter(sequence, chooser, OutputText(decoder, request.stop, eos))

    def _lay_out(self, drafts: SequenceOf[Draft]) -> StepBatch:
        """The flat batch: of each draft, the nodes that are worth their time."""
        rows = []
        for work, tree in drafts:
            sequence = work.sequence
            chain = sequence.tokens(sequence.committed, work.tokens)
            rows.append(BatchRow(self._pool.pages(sequence), sequence.committed, chain, tree, work.tokens - 1))
        return lay_out(rows, self._policy.least_score(drafts))

    def _choices(self, batch: StepBatch, drafts: SequenceOf[Draft]) -> Choices:
        """How a runner that chooses tokens does so for each draft."""
        rows: list[ScoreRules | int] = []
        logprobs: list[int | None] = []
        for row, (work, _) in enumerate(drafts):
            writer = self._writers[work.sequence]
            rows.append(writer.rules(*_tree(batch, row, work)) if work.reaches_end else ON_HOST)
            logprobs.append(writer.logprobs if work.reaches_end else None)
        return Choices.of(rows, logprobs)

    def _hand_over(self, batch: StepBatch, drafts: SequenceOf[Draft], choices: Choices | None) -> StepInFlight:
        """Begins the forward pass."""
        top_k = self._policy.top_k(drafts)
        if self._overlapping is not None:
            return self._overlapping.begin(batch, top_k, choices)
        started = time.perf_counter()
        predictions = self._runner.step(batch, top_k, choices)
        return Computed(predictions, time.perf_counter() - started)

    def _verify(self, step: BegunStep, predictions: Predictions, outputs: list[StepOutput]) -> list[_Verified]:
        """What each sequence writes. A sequence that fails is ended, and its last output added to `outputs`."""
        verified, logit_row, kept = [], 0, step.kept
        for row, (work, _) in enumerate(step.drafts):
            tokens, parents = _tree(step.batch, row, work)
            rows = slice(logit_row, logit_row + tokens.size)
            logit_row = rows.stop
            sequence = work.sequence
            if not step.is_valid(row):
                continue
            if not work.reaches_end:
                sequence.committed += work.tokens
                continue
            try:
                at_nodes = predictions.of_rows(rows)
                path = self._writers[sequence].verify(tokens, parents, at_nodes)
            except Exception as error:
                if not isinstance(error, DraftwoodError):
                    _log.exception("request %r failed in verification", sequence.request.request_id)
                outputs.append(self._end(sequence, error, keep=False))
                continue
            top_tokens = at_nodes.top(self._policy.feedback_top_k(sequence))
            feedback = Feedback(tokens, parents, at_nodes.tokens, top_tokens)
            moved = kept is not None and bool(kept[row])
            verified.append(_Verified(sequence, sequence.committed + work.tokens, moved, path, feedback))
        return verified

    def _keep(self, verified: SequenceOf[_Verified]) -> None:
        """Moves the KV entries of accepted nodes behind the committed ones."""
        sources, targets, begins = [], [], [0]
        for one in verified:
            for depth, node in enumerate(one.path.nodes):
                if node != depth and not one.kept:
                    sources.append(self._pool.slot(one.sequence, one.committed + node))
                    targets.append(self._pool.slot(one.sequence, one.committed + depth))
            if len(sources) > begins[-1]:
                begins.append(len(sources))
        if sources:
            self._runner.keep(KVMoves(*(np.array(part, np.int32) for part in (sources, targets, begins))))

    def _commit(self, one: _Verified, model_seconds: float, sharing: int) -> StepOutput:
        sequence, path, accepted = one.sequence, one.path, len(one.path.nodes)
        sequence.committed = one.committed + accepted
        sequence.output.extend(path.token_ids)
        sequence.stats.record_step(len(one.feedback.tokens) - 1, accepted)
        self._policy.observe(sequence, Outcome(path.token_ids, accepted, one.feedback, model_seconds, sharing))
        if path.finish:
            self._finish(sequence)
        elif sequence.grammar is not None:
            sequence.grammar.prepare(self._masking)
        drafted = [i < accepted for i in range(len(path.token_ids))]
        tree = _verified_tree(one) if sequence.request.draft_trees else None
        return StepOutput(sequence, path.token_ids, path.texts, drafted, path.finish, path.logprobs, tree)

    def _fail(self, drafts: SequenceOf[Draft], cause: Exception) -> list[StepOutput]:
        """Ends the sequences of a step that failed in the model."""
        _log.error("the model failed in a step of %d sequences", len(drafts), exc_info=cause)
        outputs = []
        for work, _ in drafts:
            error = ModelError(f"the model failed: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
            if work.sequence.state is not SequenceState.FINISHED:
                outputs.append(self._end(work.sequence, error, keep=False))
        return outputs

    def _end(self, sequence: Sequence, error: Exception, keep: bool = True) -> StepOutput:
        self._finish(sequence, keep)
        return StepOutput.failed(sequence, error)

    def _finish(self, sequence: Sequence, keep: bool = True) -> None:
        """Frees all that a sequence holds; `keep`: its keys and values are valid."""
        self._scheduler.finish(sequence, keep)
        sequence.stats.finished_at = time.perf_counter()
        self._writers.pop(sequence, None)
        self._policy.close(sequence)


def _tree(batch: StepBatch, row: int, work: Work) -> tuple[Int32Array, Int32Array]:
    """Tokens and parents of the draft tree of a batch row with its root, the last token before it, which is node 0."""
    root, end = int(batch.begins[row]) + work.tokens - 1, int(batch.begins[row + 1])
    return batch.tokens[root:end], batch.parents[root:end] - np.int32(work.tokens - 1)


def _verified_tree(one: _Verified) -> VerifiedTree:
    tokens, parents = one.feedback.tokens[1:], one.feedback.parents[1:] - 1  # without the root
    return VerifiedTree(tokens.tolist(), parents.tolist(), one.path.nodes)
