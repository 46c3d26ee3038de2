"""The engine: sequences in, tokens out, one `step()` at a time. Knows nothing of gRPC or Redis."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch

from model_runner.drafting.budget import worthwhile_score
from model_runner.drafting.draft_account import Payoff
from model_runner.drafting.guarded_drafter import GuardedDrafter, draft_for
from model_runner.engine_config import EngineConfig
from model_runner.errors import DeadlineError, EngineStoppedError, InvalidValueError, ModelError
from model_runner.loading.model import LoadedModel
from model_runner.loading.tokenizer import OutputText
from model_runner.runners.torch.attention import Segment, StepBatch, chain_then_tree
from model_runner.runners.torch.exact_attention import draft_limits
from model_runner.runners.torch.kv_cache import KVCache, default_capacity
from model_runner.runners.torch.most_probable import most_probable
from model_runner.sampling.token_chooser import TokenChooser
from model_runner.sampling.verify import ROOT, walk
from model_runner.scheduling.kv_pool import KVPool
from model_runner.scheduling.scheduler import Scheduler, Work
from model_runner.sequence import Finish, FinishReason, Sequence, SequenceState, StepOutput
from model_runner.step_measuring import measure_step_times
from strategies import EMPTY_TREE, DraftTree, Feedback
from strategies.draft import Int32Array

__all__ = ["Engine", "EngineConfig"]

_log = logging.getLogger(__name__)

_STAND_BACK = 3
"""Steps in which a sequence writes nothing while prompts wait, at most, one after another."""

_WORTH_STANDING_BACK = 0.5
"""Tokens of a sequence's drafts that must be accepted for it to stand back."""

_REMEMBERED_PAYOFFS = 4096
"""Pairs of a tenant and a strategy whose drafts' payoff is remembered; the one not seen for longest leaves."""


@dataclass(eq=False, slots=True)
class _Live:
    """What the engine keeps for a sequence from its first step to its end, preempted or not."""

    drafter: GuardedDrafter
    chooser: TokenChooser
    text: OutputText
    stood_back: int = 0
    """Steps in which it wrote nothing, for prompts to be read sooner, since it last wrote."""

    def may_stand_back(self, work: Work) -> bool:
        """Whether it may leave out a step, and makes up for that when it drafts again."""
        writes = work.tokens == 1 and len(work.sequence.output) > 0
        return writes and self.stood_back < _STAND_BACK and self.drafter.expected >= _WORTH_STANDING_BACK


@dataclass(eq=False, slots=True)
class _Turn:
    """One sequence's part in the step under way: its segment of the batch, and its rows of the logits."""

    work: Work
    live: _Live
    segment: Segment
    rows: slice

    @property
    def tokens(self) -> Int32Array:
        """int32[n]: the last committed token and the draft tree's nodes under it."""
        return self.segment.tokens[self.work.tokens - 1 :]

    @property
    def parents(self) -> Int32Array:
        """int32[n], in this numbering; -1 for the first."""
        root = self.work.tokens - 1
        return self.segment.parents[root:] - np.int32(root)


class _Predicted(NamedTuple):
    """What the model says after each row of a step: logits [row, vocab], the most probable token int32[row], and the
    most probable ones int32[row, k], as many as any drafter wants to see."""

    logits: torch.Tensor
    tokens: Int32Array
    top_tokens: Int32Array | None

    def of(self, rows: slice, top_k: int) -> _Predicted:
        """The part of one sequence, whose drafter wants to see `top_k` tokens."""
        logits, tokens, top_tokens = self
        if rows.stop - rows.start < tokens.size:
            logits, tokens = logits[rows], tokens[rows]
            top_tokens = None if top_tokens is None else top_tokens[rows]
        if top_tokens is not None and top_k < top_tokens.shape[1]:
            top_tokens = np.ascontiguousarray(top_tokens[:, :top_k]) if top_k else None
        return _Predicted(logits, tokens, top_tokens)


class Engine:
    """Continuous batching over draft trees. One thread calls all methods.

    Attributes:
        drafting_failures: for each strategy, by name, how many sequences it was switched off for.

    Raises:
        InvalidValueError: the KV cache, as configured or as memory allows, cannot hold one full context.
    """

    def __init__(self, model: LoadedModel, config: EngineConfig = EngineConfig()) -> None:
        self.model = model
        self.config = config
        full = model.max_context + config.max_draft_nodes
        capacity = config.kv_cache_tokens
        if capacity is None:
            capacity = default_capacity(model.layout, full, config.max_running)
        if capacity < full:
            raise InvalidValueError("kv_cache_tokens", capacity, f"one full context with its drafts needs {full}")
        self._kv = KVCache(model.layout, capacity)
        self._pool = KVPool(self._kv, capacity, full, config.prefix_cache)
        self._scheduler = Scheduler(
            self._pool, config.max_running, config.prefill_chunk, config.shared_prefill_chunk, config.tenant_weights
        )
        self._live: dict[Sequence, _Live] = {}
        self.drafting_failures: Counter[str] = Counter()
        self._payoff = lru_cache(_REMEMBERED_PAYOFFS)(_new_payoff)
        self._closed = False
        self._most_threads = torch.get_num_threads() if config.threads is None else config.threads
        self._step_times = None
        if config.adaptive_budget:
            self._step_times = measure_step_times(model, 1 + config.max_draft_nodes, self._most_threads)

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
            InvalidValueError: it does not fit the model's context or vocabulary, or asks for too wide a draft.
        """
        if self._closed:
            raise EngineStoppedError("the engine is closed")
        length = int(sequence.prompt.size) + sequence.stop.max_tokens
        if length > self.model.max_context:
            raise InvalidValueError(
                "prompt", length, f"prompt and max_tokens together are at most {self.model.max_context} tokens"
            )
        if not 0 <= int(sequence.prompt.min()) <= int(sequence.prompt.max()) < self.model.vocab_size:
            raise InvalidValueError("prompt", sequence.prompt, f"token ids lie in [0, {self.model.vocab_size})")
        if not 0 <= sequence.max_draft_nodes <= self.config.max_draft_nodes:
            raise InvalidValueError(
                "max_draft_nodes", sequence.max_draft_nodes, f"it must lie in [0, {self.config.max_draft_nodes}]"
            )
        if sequence.stats.arrived_at == 0.0:
            sequence.stats.arrived_at = time.perf_counter()
        if sequence.deadline is not None and self._step_times is not None:
            self._scheduler.step_seconds = float(self._step_times.between(1, 1, sequences=1)[0])
        self._scheduler.add(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence without further output. Does nothing for one that has ended."""
        if sequence.state is not SequenceState.FINISHED:
            self._finish(sequence)

    def close(self) -> None:
        """Ends all sequences; the engine takes no more."""
        self._closed = True
        for sequence in self._scheduler.live:
            self._finish(sequence)

    def check(self) -> None:
        """Asserts that slots, slabs and drafters are held by sequences that have run and not ended, and by no other."""
        self._scheduler.check()
        assert self._live.keys() <= {*self._scheduler.running, *self._scheduler.preempted}
        assert self._kv.tokens_out == self._pool.tokens_out

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Schedules, drafts, runs the model once, verifies, commits. Returns what was written, sequence by sequence.

        An error in the model ends the sequences of this step with it; one in a sequence's own part, or its deadline,
        ends that one.
        """
        started = time.perf_counter()
        outputs = self._expire(started)
        batch = self._lay_out(self._propose(self._schedule(started)))
        if not batch:
            return outputs
        drafted = time.perf_counter()
        try:
            predicted = self._forward(batch)
        except Exception as error:
            return outputs + self._fail(batch, error)
        model_seconds = time.perf_counter() - drafted
        outputs += [output for turn in batch if (output := self._commit(turn, predicted)) is not None]
        for turn in batch:
            turn.work.sequence.stats.model_seconds += model_seconds
            turn.work.sequence.stats.step_seconds += time.perf_counter() - started
        return outputs

    def _expire(self, now: float) -> list[StepOutput]:
        """Ends the sequences that are too late."""
        outputs = []
        for sequence in self._scheduler.overdue(now):
            assert sequence.deadline is not None
            error = DeadlineError(now - sequence.deadline)
            outputs.append(StepOutput(sequence, [], [], [], Finish(FinishReason.ERROR, error=error)))
            self._finish(sequence)
        return outputs

    def _schedule(self, now: float) -> list[Work]:
        """The step's work, with what each of its sequences needs to draft and to write."""
        plan = self._scheduler.schedule()
        for work in plan:
            if work.sequence not in self._live:
                self._start(work.sequence, now)
        return plan

    def _start(self, sequence: Sequence, now: float) -> None:
        sequence.stats.first_scheduled_at = now
        payoff = self._payoff(sequence.tenant, sequence.strategy_name)
        decoder = self.model.tokenizer.stream(sequence.prompt, sequence.include_special_tokens)
        self._live[sequence] = _Live(
            GuardedDrafter(sequence, self.model.vocab_size, self.drafting_failures, payoff),
            TokenChooser(sequence, self.model.eos_token_ids, self.model.vocab_size),
            OutputText(decoder, sequence.stop, self.model.eos_token_ids),
        )

    def _propose(self, plan: list[Work]) -> list[tuple[Work, DraftTree]]:
        """What takes part in the step, with its draft.

        While a prompt needs further steps it waits for each of them to end. So nobody drafts then, and those whose
        drafts pay stand back altogether, for a few steps: afterwards one step with a draft makes up for them.
        """
        prompts_wait = len(plan) < self.running or not all(work.reaches_end for work in plan)
        proposed = []
        for work in plan:
            live = self._live[work.sequence]
            if prompts_wait and live.may_stand_back(work):
                live.stood_back += 1
                continue
            drafts = not prompts_wait or live.stood_back == _STAND_BACK
            live.stood_back = 0
            proposed.append((work, self._draft(work.sequence, live.drafter) if drafts else EMPTY_TREE))
        return proposed

    def _draft(self, sequence: Sequence, drafter: GuardedDrafter) -> DraftTree:
        if not self.model.layout.exact:
            return draft_for(sequence, drafter)
        deepest, most = draft_limits(sequence.length - 1)
        return draft_for(sequence, drafter, deepest, most)

    def _lay_out(self, proposed: list[tuple[Work, DraftTree]]) -> list[_Turn]:
        """The flat batch: of each draft, the nodes that are worth their time within one budget for all."""
        least = 0.0
        if self._step_times is not None:
            step_times = partial(self._step_times.between, sequences=len(proposed))
            tokens = sum(work.tokens for work, _ in proposed)
            least = worthwhile_score([tree for _, tree in proposed], tokens, step_times)
        turns, row = [], 0
        for work, tree in proposed:
            sequence, slab = work.sequence, self._pool.slab(work.sequence)
            chain = sequence.tokens(sequence.committed, work.tokens)
            nodes = chain_then_tree(chain, tree, least)
            segment = Segment(slab, sequence.committed, *nodes, logit_rows=work.tokens - 1)
            rows = slice(row, row + segment.size - segment.logit_rows)
            turns.append(_Turn(work, self._live[sequence], segment, rows))
            row = rows.stop
        return turns

    def _forward(self, batch: list[_Turn]) -> _Predicted:
        """The rows as the turns' `rows` say."""
        tokens, times = sum(turn.segment.size for turn in batch), self._step_times
        threads = self._most_threads
        if times is not None:
            reads_prompt = any(turn.work.tokens > 1 for turn in batch)  # somebody waits for a first token
            threads = times.choose_threads(tokens, len(batch), urgent=reads_prompt)
        torch.set_num_threads(threads)
        started = time.perf_counter()
        inputs = StepBatch([turn.segment for turn in batch], self.model.layout).inputs()
        logits = self.model.module(**inputs).logits[0]
        predictions, top_tokens = most_probable(logits, max(turn.live.drafter.top_k for turn in batch))
        if times is not None:
            times.observe(tokens, len(batch), threads, time.perf_counter() - started)
        return _Predicted(logits, predictions, top_tokens)

    def _commit(self, turn: _Turn, predicted: _Predicted) -> StepOutput | None:
        """Keeps the accepted path; None for a prompt that is not through yet."""
        sequence = turn.work.sequence
        if not turn.work.reaches_end:
            sequence.committed += turn.work.tokens
            return None
        try:
            return self._verify(turn, predicted.of(turn.rows, turn.live.drafter.top_k))
        except Exception as error:
            _log.exception("request %r failed in verification", sequence.request_id)
            self._finish(sequence, keep=False)
            return StepOutput(sequence, [], [], [], Finish(FinishReason.ERROR, error=error))

    def _verify(self, turn: _Turn, predicted: _Predicted) -> StepOutput:
        sequence, live = turn.work.sequence, turn.live
        tokens, parents = turn.tokens, turn.parents
        token_ids, texts, logprobs, path, finish = [], [], [], [], None
        logits, choices, at = predicted.logits, predicted.tokens.tolist(), ROOT
        for token, node in walk(tokens, parents, lambda node: live.chooser.choose(logits[node], choices[node])):
            if sequence.sampling.logprobs is not None:
                logprobs.append(live.chooser.logprobs(logits[at], token))
            at = node
            text, finish = live.text.push(token)
            token_ids.append(token)
            texts.append(text)
            if node != ROOT:
                path.append(node - 1)
            if finish:
                break
        turn.segment.slab.keep(sequence.committed + turn.work.tokens, path)
        sequence.committed += turn.work.tokens + len(path)
        sequence.output.extend(token_ids)
        _record(sequence, len(tokens) - 1, len(path))
        live.drafter.observe(token_ids, Feedback(tokens, parents, predicted.tokens, predicted.top_tokens))
        if finish:
            self._finish(sequence)
        drafted = [i < len(path) for i in range(len(token_ids))]
        return StepOutput(sequence, token_ids, texts, drafted, finish, logprobs)

    def _fail(self, batch: list[_Turn], cause: Exception) -> list[StepOutput]:
        _log.error("the model failed in a step of %d sequences", len(batch), exc_info=cause)
        outputs = []
        for turn in batch:
            error = ModelError(f"the model failed: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
            self._finish(turn.work.sequence, keep=False)
            outputs.append(StepOutput(turn.work.sequence, [], [], [], Finish(FinishReason.ERROR, error=error)))
        return outputs

    def _finish(self, sequence: Sequence, keep: bool = True) -> None:
        """Frees all that a sequence holds; `keep` says that its keys and values are sound."""
        self._scheduler.finish(sequence, keep)
        sequence.stats.finished_at = time.perf_counter()
        live = self._live.pop(sequence, None)
        if live is not None:
            live.drafter.close()


def _new_payoff(tenant: str, strategy_name: str) -> Payoff:
    return Payoff()


def _record(sequence: Sequence, drafted: int, accepted: int) -> None:
    stats = sequence.stats
    if stats.decode_steps == 0:
        stats.first_token_at = time.perf_counter()
    stats.decode_steps += 1
    stats.draft_tokens += drafted
    stats.accepted_tokens += accepted
    by_depth = stats.accepted_by_depth
    by_depth.extend([0] * (accepted - len(by_depth)))
    for depth in range(accepted):
        by_depth[depth] += 1
