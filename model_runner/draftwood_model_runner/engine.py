"""The engine: sequences in, tokens out, one `step()` at a time. Knows nothing of gRPC, Redis or torch."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as SequenceOf
from concurrent.futures import FIRST_COMPLETED, wait
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np

from draftwood_model_runner.answer import Answer
from draftwood_model_runner.begun_step import BegunStep, Computed
from draftwood_model_runner.drafting.draft_policy import DraftPolicy, Drafts, Outcomes
from draftwood_model_runner.drafting.overlap import Overlap
from draftwood_model_runner.drafting.step_measuring import measure_step_times
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
from draftwood_model_runner.redecoding import PREFILL_TOKENS, Redecoding
from draftwood_model_runner.runners.base import (
    KVMoves,
    OverlappingRunner,
    Predictions,
    StatefulRunner,
    StepBatch,
    StepInFlight,
)
from draftwood_model_runner.runners.batch import Chains, lay_out_trees
from draftwood_model_runner.runners.choices import ON_HOST, Choices, ScoreRules
from draftwood_model_runner.runners.host.cpus import usable_cpus
from draftwood_model_runner.runners.host.row_threads import LEAST_NUMBERS, in_threads, parts
from draftwood_model_runner.sampling.background import background_threads
from draftwood_model_runner.sampling.output_text import OutputText
from draftwood_model_runner.sampling.sequence_writer import AcceptedPath, SequenceWriter
from draftwood_model_runner.sampling.token_chooser import TokenChooser
from draftwood_model_runner.sampling.verify import follow_all
from draftwood_model_runner.scheduling.kv_pool import KVPool, KVUse
from draftwood_model_runner.scheduling.page_table import AttentionWindow
from draftwood_model_runner.scheduling.scheduler import Plan, Scheduler, Work
from draftwood_model_runner.sequence import Sequence, SequenceState
from draftwood_model_runner.statistics import EngineCounts
from draftwood_strategies.base import StepFeedback
from draftwood_strategies.budgeting.watchdog import Watchdog
from draftwood_strategies.draft import Int32Array
from draftwood_strategies.native import sizes_between

__all__ = ["Engine", "EngineConfig"]

_log = logging.getLogger(__name__)


_MASK_SECONDS = 0.001
"""How long a step without work waits for a mask: what arrives meanwhile waits as long. Not tuned."""


_WIDE = 512
"""Tokens of a step that is measured at the start on a GPU, whose arithmetic takes longer than reading the weights from
some hundred tokens on: only measured times tell where (`Overlap`). Not tuned."""


class _Verified(NamedTuple):
    """What sequences write in the step.

    Attributes:
        feedback: at all nodes of the step.
        rows: the batch row of each sequence that writes.
        committed: of each, tokens whose keys and values are computed, before those of the path.
        kept: of each, whether the runner has moved keys and values of the path.
    """

    feedback: StepFeedback
    rows: list[int]
    sequences: list[Sequence]
    committed: list[int]
    kept: list[bool]
    paths: list[AcceptedPath]

    def each(self) -> Iterator[tuple[Sequence, int, bool, AcceptedPath]]:
        """Sequence, committed tokens, kept and path of each row."""
        return zip(self.sequences, self.committed, self.kept, self.paths, strict=True)


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
        full, window = model.max_context + config.max_draft_nodes, None
        if model.factory.window is not None:
            window = AttentionWindow(model.factory.window, max(config.prefill_chunk, PREFILL_TOKENS))
        least = full if window is None else min(full, window.needs(config.max_draft_nodes))
        capacity = config.kv_cache_tokens
        if capacity is None:
            capacity = model.factory.default_kv_tokens(least, -(-config.max_running * full // least))
        if capacity < least:
            raise InvalidValueError("kv_cache_tokens", capacity, f"one full context with its drafts needs {least}")
        self._runner = model.factory.runner(capacity, config.threads)
        states = self._runner.states if isinstance(self._runner, StatefulRunner) else None
        self._pool = KVPool(self._runner.pages, self._runner.page_size, config.prefix_cache, states, window)
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
        self._threads = config.threads or usable_cpus()
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
        deadline, ends that one. If the device's memory does not suffice, half of the sequences wait for a while.

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
        if not drafts.work:
            return None
        batch = self._lay_out(drafts)
        try:
            choices = self._choices(batch, drafts.work) if self._runner.chooses else None
            begun = self._hand_over(batch, drafts, choices)
        except DeviceLostError:
            raise
        except Exception as error:
            outputs += self._failed(drafts.work, error)
            return None
        kept = None if choices is None else choices.kinds != ON_HOST
        runs = [work.sequence.runs for work in drafts.work]
        return BegunStep(batch, drafts.work, runs, kept, begun, started, time.perf_counter() - started)

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
            outputs += self._failed([work for row, work in enumerate(step.work) if step.is_valid(row)], error)
            return
        outputs += self._commit(verified, seconds, len(step.work))
        ended = time.perf_counter()
        if step.only_decodes:
            self._overlap.observe(step.batch, step.host_seconds + ended - began)
        self._steps += 1
        self._model_seconds += seconds
        taken = ended - step.started
        for work in step.work:
            stats = work.sequence.stats
            stats.model_seconds += seconds
            stats.step_seconds += taken

    def _failed(self, work: SequenceOf[Work], error: Exception) -> list[StepOutput]:
        """What becomes of the sequences of a step that failed: fewer run for a while, or they end."""
        if isinstance(error, DeviceMemoryError) and self._scheduler.run_fewer():
            _log.warning("%s; %d sequences run at once for now", error, self._scheduler.max_running)
            return []
        return self._fail(work, error)

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

    def _lay_out(self, drafts: Drafts) -> StepBatch:
        """The flat batch: of each draft, the nodes that are worth their time."""
        sizes = [work.tokens for work in drafts.work]
        sequences = [work.sequence for work in drafts.work]
        if all(one.committed + 1 == one.length for one in sequences):  # all decode
            tokens = np.array([one.last_token for one in sequences], np.int32)
        else:
            tokens = np.concatenate([one.tokens(one.committed, n) for one, n in zip(sequences, sizes, strict=True)])
        chains = Chains(
            pages=[self._pool.pages(one) for one in sequences],
            contexts=np.array([one.committed for one in sequences], np.int32),
            tokens=tokens,
            begins=np.cumsum([0, *sizes], dtype=np.int32),
            logits_from=np.array(sizes, np.int32) - np.int32(1),
        )
        return lay_out_trees(chains, drafts.trees, drafts.levels, self._policy.least_score(drafts))

    def _choices(self, batch: StepBatch, works: SequenceOf[Work]) -> Choices:
        """How a runner that chooses tokens does so for each sequence."""
        rows: list[ScoreRules | int] = []
        logprobs: list[int | None] = []
        for row, work in enumerate(works):
            writer = self._writers[work.sequence]
            rows.append(writer.rules(*_tree(batch, row, work)) if work.reaches_end else ON_HOST)
            logprobs.append(writer.logprobs if work.reaches_end else None)
        return Choices.of(rows, logprobs)

    def _hand_over(self, batch: StepBatch, drafts: Drafts, choices: Choices | None) -> StepInFlight:
        """Begins the forward pass."""
        top_k = self._policy.top_k(drafts)
        if self._overlapping is not None:
            return self._overlapping.begin(batch, top_k, choices)
        started = time.perf_counter()
        predictions = self._runner.step(batch, top_k, choices)
        return Computed(predictions, time.perf_counter() - started)

    def _verify(self, step: BegunStep, predictions: Predictions, outputs: list[StepOutput]) -> _Verified:
        """What each sequence writes. A sequence that fails is ended, and its last output added to `outputs`."""
        feedback = _feedback(step.batch, step.work, predictions)
        nodes, tokens = np.empty((2, feedback.tokens.shape[0]), np.int32)
        ends = np.empty(len(step.work), np.int32)
        follow_all(feedback.tokens, feedback.parents, feedback.begins, feedback.predictions, nodes, tokens, ends)
        nodes_of, tokens_of, begin = nodes.tolist(), tokens.tolist(), 0
        chosen = self._choose(step, feedback, predictions)
        verified = _Verified(feedback, [], [], [], [], [])
        for row, (work, end) in enumerate(zip(step.work, ends.tolist(), strict=True)):
            path_of, begin = slice(begin, end), end
            if not step.is_valid(row):
                continue
            sequence = work.sequence
            if not work.reaches_end:
                sequence.committed += work.tokens
                continue
            writer = self._writers[sequence]
            if row in chosen:
                path = chosen[row]
            else:
                path = _unless_it_fails(partial(writer.write, tokens_of[path_of], nodes_of[path_of]))
            if isinstance(path, Exception):
                if not isinstance(path, DraftwoodError):
                    _log.error("request %r failed in verification", sequence.request.request_id, exc_info=path)
                outputs.append(self._end(sequence, path, keep=False))
                continue
            verified.rows.append(row)
            verified.sequences.append(sequence)
            verified.committed.append(sequence.committed + work.tokens)
            verified.kept.append(step.kept is not None and bool(step.kept[row]))
            verified.paths.append(path)
        return verified

    def _choose(
        self, step: BegunStep, feedback: StepFeedback, predictions: Predictions
    ) -> dict[int, AcceptedPath | Exception]:
        """By batch row, what the sequences write whose tokens are not those that the runner predicted."""

        def verify(rows: list[int]) -> list[AcceptedPath | Exception]:
            found = []
            for row in rows:
                own, writer = feedback.of_row(row), self._writers[step.work[row].sequence]
                args = feedback.tokens[own], feedback.parents[own], predictions.of_rows(own)
                found.append(_unless_it_fails(partial(writer.verify, *args)))
            return found

        writers = [self._writers.get(work.sequence) if work.reaches_end else None for work in step.work]
        sampling = [row for row, writer in enumerate(writers) if writer is not None and not writer.follows_predictions]
        rows = [row for row in sampling if step.is_valid(row)]
        if not rows:
            return {}
        many = len(rows) * self.model.vocab_size >= LEAST_NUMBERS and not self._runner.chooses
        groups = [rows[part.start : part.stop] for part in parts(len(rows), self._threads if many else 1)]
        paths = in_threads([partial(verify, group) for group in groups], self._threads)
        return dict(zip(rows, chain.from_iterable(paths), strict=True))

    def _keep(self, verified: _Verified) -> None:
        """Moves the KV entries of accepted nodes behind the committed ones."""
        sources, targets, begins = [], [], [0]
        for sequence, committed, kept, path in verified.each():
            if kept or not path.nodes or path.nodes[-1] == len(path.nodes) - 1:
                continue  # they are there
            for depth, node in enumerate(path.nodes):
                if node != depth:
                    sources.append(self._pool.slot(sequence, committed + node))
                    targets.append(self._pool.slot(sequence, committed + depth))
            begins.append(len(sources))
        if not sources:
            return
        try:
            self._runner.keep(KVMoves(*(np.array(part, np.int32) for part in (sources, targets, begins))))
        except DeviceMemoryError as error:  # no smaller step helps: what was accepted is not where it belongs
            raise ModelError(str(error)) from error

    def _commit(self, verified: _Verified, model_seconds: float, sharing: int) -> list[StepOutput]:
        """Appends what was written, lets drafters learn, and ends the sequences that are complete."""
        if not verified.rows:
            return []
        sizes = sizes_between(verified.feedback.begins).tolist()
        outputs, written, lengths, accepted_of = [], [], [], []
        for row, (sequence, committed, _, path) in zip(verified.rows, verified.each(), strict=True):
            accepted, token_ids = len(path.nodes), path.token_ids
            sequence.committed = committed + accepted
            sequence.output.extend(token_ids)
            sequence.stats.record_step(sizes[row] - 1, accepted)
            written += token_ids
            lengths.append(len(token_ids))
            accepted_of.append(accepted)
            drafted = [True] * accepted + [False] * (len(token_ids) - accepted)
            tree = _verified_tree(verified.feedback, row, path) if sequence.request.draft_trees else None
            outputs.append(StepOutput(sequence, token_ids, path.texts, drafted, path.finish, path.logprobs, tree))
        all_rows = len(verified.rows) == len(sizes)
        feedback = verified.feedback if all_rows else verified.feedback.part(verified.rows)
        begins = np.cumsum([0, *lengths], dtype=np.int32)
        tokens = np.array(written, np.int32)
        self._policy.observe(
            Outcomes(verified.sequences, tokens, begins, accepted_of, feedback, model_seconds, sharing)
        )
        for output in outputs:
            if output.finish:
                self._finish(output.sequence)
            elif output.sequence.grammar is not None:
                output.sequence.grammar.prepare(self._masking)
        return outputs

    def _fail(self, works: SequenceOf[Work], cause: Exception) -> list[StepOutput]:
        """Ends the sequences of a step that failed in the model."""
        _log.error("the model failed in a step of %d sequences", len(works), exc_info=cause)
        outputs = []
        for work in works:
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


def _feedback(batch: StepBatch, works: SequenceOf[Work], predictions: Predictions) -> StepFeedback:
    """The predictions at all nodes: of each row, the last token of its chain and the draft tree under it."""
    before = np.array([work.tokens for work in works], np.int32) - np.int32(1)
    if not before.any():
        return StepFeedback(batch.tokens, batch.parents, predictions.tokens, predictions.top_tokens, batch.begins)
    begins = batch.begins - np.concatenate([np.zeros(1, np.int32), np.cumsum(before, dtype=np.int32)])
    parents = batch.parents[batch.logit_rows] - np.repeat(before, sizes_between(begins))
    tokens = batch.tokens[batch.logit_rows]
    return StepFeedback(tokens, parents, predictions.tokens, predictions.top_tokens, begins)


def _verified_tree(feedback: StepFeedback, row: int, path: AcceptedPath) -> VerifiedTree:
    own = feedback.of_row(row)
    tokens, parents = feedback.tokens[own][1:], feedback.parents[own][1:] - 1  # without the root
    return VerifiedTree(tokens.tolist(), parents.tolist(), path.nodes)


def _unless_it_fails(call: Callable[[], AcceptedPath]) -> AcceptedPath | Exception:
    try:
        return call()
    except Exception as error:
        return error
