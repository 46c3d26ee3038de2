"""The contenders of `bench speed`: transformers with and without prompt lookup, peers, our engine with each strategy.

All of them continue token ids and write one answer at a time. A peer runs in a process of its own.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any

import torch

from draftwood_benchmarks.harness.answers import Task, finish, generate, sequences
from draftwood_benchmarks.harness.models import synchronize
from draftwood_benchmarks.harness.report import BenchmarkError, progress
from draftwood_benchmarks.peers.process import PLAIN, Answer, Peer
from draftwood_model_runner.engine import Engine
from draftwood_strategies import Strategy, create
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.drafting import Drafting
from draftwood_strategies.registry import warm_up

PROMPT_LOOKUP_TOKENS = 10
"""Draft tokens per step: the default of transformers' `PromptLookupCandidateGenerator`."""
_TENANTS = count(1)
"""Numbers of tenants: the payoff of drafts is measured by tenant, so each round of a contender is one of its own."""
_LEARNING_SEED = 1_000_000
"""First seed of the answers that memories learn; the seed of a measured answer is the index of its prompt."""


@dataclass(eq=False)
class Contender:
    """A way to generate text, with what it wrote. Its names are columns of the report.

    Attributes:
        warm: whether its drafts know answers to other prompts.
        again: whether they know the answers to these very prompts.
        sampled: whether it samples tokens.
        rounds: its answers in the order of the prompts, in each round.
    """

    engine: str
    strategy: str
    warm: bool = False
    again: bool = False
    sampled: bool = False
    rounds: list[list[Answer]] = field(default_factory=list)

    def begin(self, first: Int32Array, others: Sequence[Int32Array]) -> None:
        """Begins a round with an empty memory, or with one of the answers to `others`. Answers `first` before, as the
        first answer is slower."""
        if not self.rounds:
            self.answer(first, 0)

    def answer(self, prompt: Int32Array, index: int) -> Answer:
        """Continues `prompt`, int32[p]; `index` is the seed where tokens are sampled."""
        raise NotImplementedError

    @property
    def answers(self) -> list[Answer]:
        return [*chain.from_iterable(self.rounds)]

    @property
    def tokens_per_s(self) -> float:
        return _speed(self.answers)

    @property
    def spread(self) -> tuple[float, float]:
        """Tokens per second of the slowest and of the fastest round."""
        speeds = [_speed(answers) for answers in self.rounds]
        return min(speeds), max(speeds)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per step."""
        return sum(len(answer.tokens) for answer in self.answers) / sum(answer.steps for answer in self.answers)

    @property
    def nodes_per_step(self) -> float:
        return sum(answer.nodes for answer in self.answers) / sum(answer.steps for answer in self.answers)

    def share_like(self, other: Contender) -> float:
        """Share of the prompts to which both gave the same tokens."""
        pairs = zip(self.answers, other.answers, strict=True)
        return sum(mine.tokens == theirs.tokens for mine, theirs in pairs) / len(self.answers)


def _speed(answers: Sequence[Answer]) -> float:
    return sum(len(answer.tokens) for answer in answers) / sum(answer.seconds for answer in answers)


class PeerContender(Contender):
    """Another engine, in a process of its own, with drafts of its own or none."""

    def __init__(self, peer: Peer, max_tokens: int, *, warm: bool) -> None:
        super().__init__(peer.name, peer.drafts, warm)
        self._peer = peer
        self._max_tokens = max_tokens
        self._memory = ""

    def begin(self, first: Int32Array, others: Sequence[Int32Array]) -> None:
        super().begin(first, others)
        self._memory = f"{'warm' if self.warm else 'cold'} {len(self.rounds)}"
        if self.warm:
            self._peer.learn([prompt.tolist() for prompt in others], self._max_tokens, self._memory)

    def answer(self, prompt: Int32Array, index: int) -> Answer:
        return self._peer.generate(prompt.tolist(), self._max_tokens, self._memory)


class TransformersContender(Contender):
    """transformers' own greedy `generate`, as its users call it, with or without its prompt lookup decoding.

    Args:
        module: the model as transformers loads it.
        threads: CPU threads, set before each answer: our engine changes the number in this process.
    """

    def __init__(self, module: Any, max_tokens: int, threads: int, *, prompt_lookup: bool) -> None:
        super().__init__("transformers", "prompt-lookup" if prompt_lookup else PLAIN)
        self._module = module
        self._max_tokens = max_tokens
        self._threads = threads
        self._options: dict[str, Any] = {"pad_token_id": module.generation_config.pad_token_id or 0}
        if prompt_lookup:
            self._options["prompt_lookup_num_tokens"] = PROMPT_LOOKUP_TOKENS

    def answer(self, prompt: Int32Array, index: int) -> Answer:
        torch.set_num_threads(self._threads)
        widths: list[int] = []

        def note_width(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            widths.append(int(ids.shape[1]))

        hook = self._module.register_forward_pre_hook(note_width, with_kwargs=True)
        started = time.perf_counter()
        [tokens] = generate(self._module, [prompt], self._max_tokens, **self._options)
        seconds = time.perf_counter() - started
        hook.remove()
        return Answer(tokens, seconds, len(widths), sum(width - 1 for width in widths[1:]))


class EngineContender(Contender):
    """Our engine with one strategy.

    Args:
        again: the contender whose memory it takes when that has answered the prompts.
    """

    def __init__(
        self, engine: Engine, task: Task, name: str, *, warm: bool = False, again: EngineContender | None = None
    ) -> None:
        super().__init__("draftwood", name, warm, again is not None, task.temperature > 0.0)
        self._engine, self._task, self._cold = engine, task, again
        self._drafting = Drafting(name, max_nodes=0 if name == PLAIN else engine.config.max_draft_nodes)
        self._memory: Strategy | None = None
        self._tenant = ""

    def begin(self, first: Int32Array, others: Sequence[Int32Array]) -> None:
        self._tenant = f"{self.strategy} {next(_TENANTS)}"
        if self._cold is not None:
            self._memory = self._cold._memory
            return
        if not self.warm:  # compiles
            warm_up(self.strategy)
            self._memory = self._empty()
            self.answer(first, 0)
        self._memory = self._empty()
        if self.warm:
            together = self._engine.config.max_running
            for at in progress(range(0, len(others), together), f"{self.strategy}: answers to learn from"):
                self.answer_together(others[at : at + together], _LEARNING_SEED + at)

    def _empty(self) -> Strategy | None:
        return None if self.strategy == PLAIN else create(self.strategy)

    def answer(self, prompt: Int32Array, index: int) -> Answer:
        synchronize(self._engine.model)
        started = time.perf_counter()
        [sequence] = self._run([prompt], index)
        seconds = time.perf_counter() - started
        return Answer(list(sequence.output), seconds, sequence.stats.decode_steps, sequence.stats.draft_tokens)

    def answer_together(self, prompts: Sequence[Int32Array], seed: int) -> list[list[int]]:
        """Answers prompts in one batch; the strategy learns from them as in a service."""
        return [list(sequence.output) for sequence in self._run(prompts, seed)]

    def _run(self, prompts: Sequence[Int32Array], seed: int) -> list[Any]:
        request: dict[str, Any] = {"tenant": self._tenant, "drafting": self._drafting}
        if not self.sampled:  # the model's own penalties, as in transformers
            request["sampling"] = replace(self._engine.model.defaults.sampling, temperature=0.0)
        running = sequences(prompts, self._task, self._memory, seed=seed, **request)
        finish(self._engine, running)
        for sequence in running:
            if reason := sequence.stats.drafting_disabled_reason:
                raise BenchmarkError(f"strategy {self.strategy} was switched off: {reason}")
        return running


def ours(engine: Engine, task: Task, strategies: Sequence[str], *, warm: bool) -> Iterator[EngineContender]:
    """Drafting off, then each strategy: cold, and with `warm` also warm and asked the same prompts again."""
    yield EngineContender(engine, task, PLAIN)
    for name in strategies:
        cold = EngineContender(engine, task, name)
        yield cold
        if warm:
            yield EngineContender(engine, task, name, warm=True)
            yield EngineContender(engine, task, name, warm=True, again=cold)


def measure(
    contenders: Sequence[Contender], measured: Sequence[Int32Array], others: Sequence[Int32Array], rounds: int
) -> None:
    """Lets all contenders answer the measured prompts in each round; warm ones have learned from the others."""
    gc.freeze()  # as in the service: a collection that looks through the loaded model takes 0.15 s
    for number in range(rounds):
        for contender in contenders:
            contender.begin(measured[0], others)
        for contender in contenders:
            contender.rounds.append([])
        for i, prompt in enumerate(progress(measured, f"measuring, round {number + 1}")):
            first = (i + number) % len(contenders)
            for contender in [*contenders[first:], *contenders[:first]]:
                if not contender.again:
                    contender.rounds[-1].append(contender.answer(prompt, i))
        for i, prompt in enumerate(progress(measured, "measuring, the same prompts again")):
            for contender in contenders:
                if contender.again:
                    contender.rounds[-1].append(contender.answer(prompt, i))
    gc.unfreeze()  # else Triton reports at the exit what is not freed
