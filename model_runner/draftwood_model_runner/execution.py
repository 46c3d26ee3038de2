"""What the engine's steps are made of: what it allocates, a step from its layout to the end of its forward pass, and
how sequences enter, begin to run, write and end."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from draftwood_model_runner.draft_policy import DraftPolicy, Drafts
from draftwood_model_runner.engine_config import EngineConfig
from draftwood_model_runner.errors import DeadlineError, InvalidValueError, ModelError
from draftwood_model_runner.loading.facts import ModelFacts
from draftwood_model_runner.loading.loaded import LoadedModel, configured_context
from draftwood_model_runner.model_drafts import Computed, ModelDrafts
from draftwood_model_runner.output import OutputText, StepOutput
from draftwood_model_runner.plain_decoding import PREFILL_TOKENS
from draftwood_model_runner.runners.base import PageStates, Runner, StatefulRunner, StepBatch, StepInFlight
from draftwood_model_runner.runners.batch import BatchRows, lay_out_trees
from draftwood_model_runner.sampling.most_probable import log_probabilities
from draftwood_model_runner.sampling.token_sampler import TokenSampler
from draftwood_model_runner.sampling.verification import AcceptedPath
from draftwood_model_runner.scheduling.kv_pool import AttentionWindow, KVPool
from draftwood_model_runner.scheduling.scheduler import ScheduledSequence, Scheduler
from draftwood_model_runner.sequence import Sequence, SequenceState
from draftwood_strategies.arrays import Int32Array, segment_sizes
from draftwood_strategies.draft_engine.engine import DraftSession

_log = logging.getLogger(__name__)

_USUAL_CONTEXT = 4096
"""Tokens of a running request, drafts included, that the KV cache has by default on a CPU. Not tuned: most requests are
shorter, and longer ones find the place that these leave. On a GPU nothing else needs the memory."""
_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "int4": 0.5}
"""Of a weight."""


def check_capacity(path_or_id: str, max_context: int | None, config: EngineConfig) -> None:
    """Refuses a capacity before the model is loaded if its config.json is enough to tell that it does not suffice. How
    much a model needs whose layers have a window is known only after it was tried.

    Raises:
        InvalidValueError: the model has no context of `max_context` tokens, or the KV cache cannot hold a full context.
        ModelNotFoundError: there is no config.json that transformers knows.
    """
    context, window = configured_context(path_or_id, max_context)
    if config.kv_cache_tokens is not None and not window:
        _require_capacity(config.kv_cache_tokens, context + config.max_draft_nodes)


def allocate(model: LoadedModel, config: EngineConfig) -> tuple[Runner, KVPool, int]:
    """Makes the runner of a model with its memory, and logs what that takes.

    Returns:
        The runner, its pages, and how many sequences can run at once.

    Raises:
        InvalidValueError: the KV cache, as configured or as memory allows, cannot hold one full context, or the device
            has no memory for it.
    """
    full, window = model.max_context + config.max_draft_nodes, None
    if model.factory.window is not None:
        window = AttentionWindow(model.factory.window, max(config.prefill_chunk, PREFILL_TOKENS))
    needed = full if window is None else min(full, window.needs(config.max_draft_nodes))
    capacity = config.kv_cache_tokens
    if capacity is None:
        each = min(full, _USUAL_CONTEXT) if model.device == "cpu" else full
        capacity = model.factory.default_kv_tokens(needed, -(-config.max_running * each // needed))
        own, drafters = model.factory.kv_bytes_per_token, [drafter.factory for drafter in model.drafters.values()]
        if drafters and own and model.device != "cpu":  # there it is all of the memory that is free
            shared = capacity * own // (own + sum(factory.kv_bytes_per_token for factory in drafters))
            capacity = max(shared, min(capacity, needed))
    _require_capacity(capacity, needed)
    runner = model.factory.runner(capacity, config.threads, config.max_running)
    states = runner.states if isinstance(runner, StatefulRunner) else None
    tokens = runner.pages * runner.page_size
    kv_bytes = tokens * model.factory.kv_bytes_per_token
    weights = f"{model.parameters / 1e6:.0f} million weights ({model.weights})"
    if model.weights in _BYTES:
        weights += f", {model.parameters * _BYTES[model.weights] / 1e9:.2f} GB"
    _log.info("memory: %s; KV cache of %d tokens, %.2f GB", weights, tokens, kv_bytes / 1e9)
    pool = KVPool(runner.pages, runner.page_size, config.prefix_cache, states, window)
    return runner, pool, config.max_running if states is None else _running_with(states, config.max_running)


def model_drafts(model: LoadedModel, runner: Runner, config: EngineConfig) -> dict[str, ModelDrafts]:
    """The drafts of models beside a target, by the names of their strategies, with memory for its pages.

    Raises:
        InvalidValueError: a model's runner computes no trees, or it has recurrent layers, whose states are not kept.
    """
    made = {}
    for name, drafter in model.drafters.items():
        own = drafter.factory.runner(runner.pages * runner.page_size, config.threads, config.max_running)
        if not own.draft_limits(0).branches or (isinstance(own, StatefulRunner) and own.states is not None):
            raise InvalidValueError(name, drafter.name, "it must be a model of attention alone, over trees")
        made[name] = ModelDrafts(own, log_probabilities, drafter.head)
        seen = own.pages * own.page_size * drafter.factory.kv_bytes_per_token / 1e9
        _log.info("draft model %s: %.0f million weights; KV cache %.2f GB", name, drafter.parameters / 1e6, seen)
    return made


def _require_capacity(tokens: int, needed: int) -> None:
    if tokens < needed:
        raise InvalidValueError("kv_cache_tokens", tokens, f"one full context with its drafts needs {needed}")


def _running_with(states: PageStates, wanted: int) -> int:
    """How many sequences can run at once. Logs what their states take."""
    fitting = min(wanted, states.sequences)
    each = states.bytes_per_sequence
    _log.info("recurrent layers: states of %d sequences, %.2f GB", fitting, fitting * each / 1e9)
    if fitting < wanted:
        _log.warning("memory holds the recurrent states of %d sequences; so many run at once at most", fitting)
    return fitting


class BegunStep(NamedTuple):
    """What the device computes, and for whom.

    Attributes:
        scheduled: what its sequences compute.
        slot_generations: of each sequence, see `Sequence.slot_generation`.
        started: on the clock of `time.perf_counter`.
        host_seconds: that it took to schedule, to draft and to begin.
        room: of a step that follows another, how many nodes the draft of each session that the device drafted for has
            room for.
    """

    batch: StepBatch
    scheduled: list[ScheduledSequence]
    slot_generations: list[int]
    on_device: StepInFlight
    started: float
    host_seconds: float
    room: Mapping[DraftSession, int] = MappingProxyType({})

    @property
    def most_written(self) -> list[int]:
        """How many tokens each sequence may write in a step that only decodes."""
        sizes: list[int] = segment_sizes(self.batch.cu_seqlens).tolist()
        return sizes

    def computed(self, row: int, position: int, nodes: SequenceOf[int]) -> Computed:
        """What it committed of a row.

        Args:
            position: of the first token of the row.
            nodes: that were accepted of the draft; those behind the last one that the sequence took are left out.
        """
        sequence, tokens = self.scheduled[row]
        accepted = [*nodes[: sequence.committed - position - tokens]]
        within = np.concatenate([np.arange(tokens), np.array(accepted, np.int64) + tokens])
        return Computed(sequence, position, within + int(self.batch.cu_seqlens[row]))

    @property
    def sequences(self) -> set[Sequence]:
        return {work.sequence for work in self.scheduled}

    @property
    def only_decodes(self) -> bool:
        """No sequence reads more than its latest token, beside its draft."""
        return all(work.tokens == 1 for work in self.scheduled)

    @property
    def valid_rows(self) -> list[int]:
        """The batch rows whose sequences still have the slots that they had when the step began."""
        rows = zip(self.scheduled, self.slot_generations, strict=True)
        return [row for row, (work, generation) in enumerate(rows) if _has_slot(work.sequence, generation)]


def _has_slot(sequence: Sequence, generation: int) -> bool:
    return sequence.state is SequenceState.RUNNING and sequence.slot_generation == generation


def lay_out_step(drafts: Drafts, pool: KVPool) -> StepBatch:
    """The flat batch of a step: of each draft, the nodes that are worth their time."""
    sizes = [work.tokens for work in drafts.scheduled]
    sequences = [work.sequence for work in drafts.scheduled]
    chains = BatchRows(
        block_tables=[pool.pages(sequence) for sequence in sequences],
        context_lens=np.array([sequence.committed for sequence in sequences], np.int32),
        tokens=_next_tokens(drafts.scheduled),
        cu_seqlens=np.cumsum([0, *sizes], dtype=np.int32),
        logits_from=np.array(sizes, np.int32) - np.int32(1),
        prompt_lens=np.array([sequence.request.prompt.size for sequence in sequences], np.int32),
    )
    return lay_out_trees(chains, drafts.trees, drafts.max_depths, drafts.min_score)


def lay_out_following(sequences: SequenceOf[Sequence], sizes: Int32Array, pool: KVPool) -> StepBatch:
    """The flat batch of a step that follows one in flight, see `FollowedRunner.follow`.

    Args:
        sizes: int32[s], tokens of each row.
    """
    contexts = np.array([sequence.longest_now - 1 for sequence in sequences], np.int32)
    tables = [pool.pages(sequence) for sequence in sequences]
    size = int(sizes.sum())
    return StepBatch(
        tokens=np.zeros(size, np.int32),
        positions=np.repeat(contexts, sizes),
        parents=np.full(size, -1, np.int32),
        cu_seqlens=np.cumsum([0, *sizes], dtype=np.int32),
        context_lens=contexts,
        block_table=np.concatenate(tables),
        cu_blocks=np.cumsum([0, *map(len, tables)], dtype=np.int32),
        logit_rows=np.arange(size, dtype=np.int32),
        prompt_lens=np.array([sequence.request.prompt.size for sequence in sequences], np.int32),
    )


def _next_tokens(scheduled: Iterable[ScheduledSequence]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """int32[c]: the tokens that sequences compute, one sequence after the other."""
    if all(work.sequence.committed + 1 == work.sequence.length for work in scheduled):  # all decode
        return np.array([work.sequence.last_token for work in scheduled], np.int32)
    return np.concatenate([work.sequence.tokens(work.sequence.committed, work.tokens) for work in scheduled])


def check_fits(sequence: Sequence, model: ModelFacts, config: EngineConfig) -> None:
    """Raises InvalidValueError if it does not fit the context or vocabulary of the model, or asks for too wide a
    draft."""
    request, limit, vocab, largest = sequence.request, model.max_context, model.vocab_size, config.max_draft_nodes
    if sequence.longest > limit:
        raise InvalidValueError(
            "prompt", sequence.longest, f"prompt and max_tokens together are at most {limit} tokens"
        )
    if not 0 <= int(request.prompt.min()) <= int(request.prompt.max()) < vocab:
        raise InvalidValueError("prompt", request.prompt, f"token ids lie in [0, {vocab})")
    if not 0 <= request.drafting.max_nodes <= largest:
        raise InvalidValueError("drafting.max_nodes", request.drafting.max_nodes, f"it must lie in [0, {largest}]")


class Writer(NamedTuple):
    """What chooses the tokens of a sequence and turns them into text, see `Sequence.writer`."""

    sampler: TokenSampler
    text: OutputText


class LiveSequences:
    """What they hold: slots and pages by the scheduler, drafters by the policy; and once they ran, writers."""

    def __init__(self, model: LoadedModel, scheduler: Scheduler, policy: DraftPolicy) -> None:
        self._model, self._scheduler, self._policy = model, scheduler, policy

    def start(self, sequences: SequenceOf[Sequence], now: float) -> list[StepOutput]:
        """Gives each of these sequences that runs for the first time what it needs to draft and to write. Returns the
        errors of those for which that fails; they have ended."""
        failed = []
        for sequence in sequences:
            if sequence.writer is None:
                sequence.stats.first_scheduled_at = now
                try:
                    sequence.writer = self._writer(sequence)
                    self._policy.start(sequence)
                except Exception as error:
                    _log.exception("request %r cannot be begun", sequence.request.request_id)
                    failed.append(self.fail(sequence, error))
        return failed

    def _writer(self, sequence: Sequence) -> Writer:
        model, request, eos = self._model, sequence.request, self._model.eos_token_ids
        sampler = TokenSampler(sequence, eos, model.vocab_size, model.defaults.constraints)
        decoder = model.tokenizer.stream(request.include_special_tokens)
        return Writer(sampler, OutputText(decoder, request.stop, eos))

    def samplers(self, scheduled: list[ScheduledSequence]) -> list[TokenSampler | None]:
        """Of each sequence; None for one that writes nothing in the step, since its prompt goes on."""
        return [work.sequence.writer.sampler if work.reaches_end else None for work in scheduled]

    def write(self, sequence: Sequence, path: AcceptedPath, verified: int) -> StepOutput | Exception:
        """What a sequence writes in a step, up to the token that ends it; or the error that ends it.

        Args:
            verified: draft tokens of the step.
        """
        writer: Writer = sequence.writer
        sampler, text = writer
        try:
            texts, finish = text.write(path.token_ids)
            if finish is None and sampler.complete:
                rest, finish = text.end()
                texts[-1] += rest
        except Exception as error:
            return error
        if finish is not None:
            path = path.cut(len(texts))
        elif path.error is not None:
            return path.error
        accepted = len(path.nodes)
        sequence.committed += accepted
        sequence.output.extend(path.token_ids)
        sequence.stats.record_step(verified, accepted, time.perf_counter())
        drafted = [True] * accepted + [False] * (len(path.token_ids) - accepted)
        return StepOutput(sequence, path.token_ids, texts, drafted, finish, path.logprobs)

    def finish(self, sequence: Sequence, keep: bool = True) -> None:
        """Frees all that a sequence holds; does nothing for one that has ended.

        Args:
            keep: its keys and values are valid.
        """
        if sequence.state is SequenceState.FINISHED:
            return
        self._scheduler.finish(sequence, keep)
        sequence.stats.finished_at = time.perf_counter()
        self._policy.close(sequence)
        sequence.writer = None

    def fail(self, sequence: Sequence, error: Exception, keep: bool = False) -> StepOutput:
        """Ends a sequence by an error; `keep` as for `finish`."""
        self.finish(sequence, keep)
        return StepOutput.failed(sequence, error)

    def fail_step(self, sequences: SequenceOf[Sequence], cause: Exception) -> list[StepOutput]:
        """Ends the sequences of a step that failed in the model."""
        _log.error("the model failed in a step of %d sequences", len(sequences), exc_info=cause)
        outputs = []
        for sequence in sequences:
            error = ModelError(f"the model failed: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
            if sequence.state is not SequenceState.FINISHED:
                outputs.append(self.fail(sequence, error))
        return outputs

    def expire(self, now: float) -> list[StepOutput]:
        """Ends the sequences that missed their deadline or cannot meet it any more."""
        outputs = []
        for sequence in self._scheduler.overdue(now):
            assert sequence.request.deadline is not None
            outputs.append(self.fail(sequence, DeadlineError(now - sequence.request.deadline), keep=True))
        return outputs

    def check(self, others: SequenceOf[Sequence] = ()) -> None:
        """Asserts that slots, KV pages, drafters and writers are held by live sequences that have run, and by no
        others; `others` hold pages as well."""
        self._scheduler.check(others)
        assert all((sequence.writer is None) is (sequence.drafting is None) for sequence in self._scheduler.live)
