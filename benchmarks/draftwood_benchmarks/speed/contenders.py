"""The contenders of `bench speed`: transformers with and without prompt lookup, a peer, our engine with each strategy.

All of them continue token ids and write one answer at a time. A peer runs in a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch

from draftwood_benchmarks.harness.answers import Task, finish, generate, sequences
from draftwood_benchmarks.harness.models import synchronize
from draftwood_benchmarks.harness.report import BenchmarkError
from draftwood_benchmarks.peers.process import Peer
from draftwood_model_runner.engine import Engine
from draftwood_strategies import Strategy
from draftwood_strategies.draft import Int32Array

PROMPT_LOOKUP_TOKENS = 10
"""Draft tokens per step: the default of transformers' `PromptLookupCandidateGenerator`."""


class Answer(NamedTuple):
    """The answer of one contender to one prompt.

    Attributes:
        tokens: the new tokens.
        seconds: from the prompt's token ids to the last token, prefill included.
        steps: forward passes that wrote tokens, the prefill included.
        nodes: draft tokens verified in them.
    """

    tokens: list[int]
    seconds: float
    steps: int
    nodes: int


class Contender(Protocol):
    """A way to generate text. Its attributes are columns of the report."""

    engine: str
    strategy: str
    warm: bool
    sampled: bool
    again: bool

    def answer(self, prompt: Int32Array, index: int) -> Answer:
        """Continues `prompt`, int32[p]; `index` is the seed where tokens are sampled."""


@dataclass(eq=False, slots=True)
class Tally:
    """A contender with its answers: in the order of the prompts, round by round.

    Attributes:
        rounds: how often the prompts were answered, each time with the memory of the first time.
    """

    contender: Contender
    answers: list[Answer] = field(default_factory=list)
    rounds: int = 1

    @property
    def tokens_per_s(self) -> float:
        return _speed(self.answers)

    @property
    def spread(self) -> tuple[float, float]:
        """Tokens per second of the slowest and of the fastest round."""
        size = len(self.answers) // self.rounds
        speeds = [_speed(self.answers[i * size : (i + 1) * size]) for i in range(self.rounds)]
        return min(speeds), max(speeds)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per step."""
        return sum(len(one.tokens) for one in self.answers) / sum(one.steps for one in self.answers)

    @property
    def nodes_per_step(self) -> float:
        return sum(one.nodes for one in self.answers) / sum(one.steps for one in self.answers)

    def share_like(self, other: Tally) -> float:
        """Share of the prompts to which both gave the same tokens."""
        pairs = zip(self.answers, other.answers, strict=True)
        return sum(mine.tokens == theirs.tokens for mine, theirs in pairs) / len(self.answers)


def _speed(answers: Sequence[Answer]) -> float:
    return sum(len(one.tokens) for one in answers) / sum(one.seconds for one in answers)


class PeerContender:
    """Another engine, in a process of its own, with drafts of its own or none.

    Args:
        warm: whether its drafts know answers to other prompts.
    """

    again = False

    def __init__(self, peer: Peer, task: Task, *, warm: bool = False) -> None:
        self.engine = peer.name
        self.strategy = peer.drafts
        self.warm = warm
        self.sampled = task.temperature > 0.0
        self._peer = peer
        self._task = task
        self._memory = ""

    def begin(self, number: int, others: Sequence[Int32Array]) -> None:
        """Begins a round with an empty memory, or one of the answers to `others`."""
        self._memory = f"{'warm' if self.warm else 'cold'} {number}"
        if self.warm:
            self._peer.learn([prompt.tolist() for prompt in others], self._task.max_tokens, self._memory)

    def answer(self, prompt: Int32Array, index: int) -> Answer:
        return Answer(*self._peer.generate(prompt.tolist(), self._task.max_tokens, self._memory), nodes=0)


class TransformersContender:
    """transformers' own greedy `generate`, as its users call it, with or without its prompt lookup decoding.

    Args:
        module: the model as transformers loads it.
        threads: CPU threads, set before each answer: our engine changes the number in this process.
    """

    engine = "transformers"
    warm = sampled = again = False

    def __init__(self, module: Any, task: Task, threads: int, *, prompt_lookup: bool) -> None:
        assert task.temperature == 0.0
        self.strategy = "prompt-lookup" if prompt_lookup else "none"
        self._module = module
        self._task = task
        self._threads = threads
        self._options: dict[str, Any] = {"pad_token_id": module.generation_config.pad_token_id or 0}
        if prompt_lookup:
            self._options["prompt_lookup_num_tokens"] = PROMPT_LOOKUP_TOKENS
        self._widths: list[int] = []

    def answer(self, prompt: Int32Array, index: int) -> Answer:
        torch.set_num_threads(self._threads)
        self._widths.clear()
        hook = self._module.register_forward_pre_hook(self._note_width, with_kwargs=True)
        started = time.perf_counter()
        [tokens] = generate(self._module, [prompt], self._task.max_tokens, **self._options)
        seconds = time.perf_counter() - started
        hook.remove()
        return Answer(tokens, seconds, len(self._widths), sum(width - 1 for width in self._widths[1:]))

    def _note_width(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        self._widths.append(int(ids.shape[1]))


class EngineContender:
    """Our engine with one strategy.

    Args:
        strategy: drafts and learns; None switches drafting off.
        warm: whether the strategy has learned from other prompts.
        number: of the round. The payoff of drafts is measured by tenant, so each round is a tenant of its own.
        again: whether the strategy has learned from these very prompts.
    """

    engine = "draftwood"

    def __init__(
        self,
        engine: Engine,
        task: Task,
        name: str,
        strategy: Strategy | None,
        *,
        warm: bool,
        number: int = 0,
        again: bool = False,
    ) -> None:
        self.strategy = name
        self.warm = warm
        self.again = again
        self.sampled = task.temperature > 0.0
        self._engine = engine
        self._task = task
        self._strategy = strategy
        self._request: dict[str, Any] = {
            "tenant": f"{name}, {'warm' if warm else 'cold'}, {number}{', sampled' * self.sampled}{', again' * again}",
            "strategy_name": name,
            "max_draft_nodes": 0 if strategy is None else engine.config.max_draft_nodes,
        }
        if not self.sampled:  # the model's own penalties, as in transformers
            self._request["sampling"] = replace(engine.model.defaults.sampling, temperature=0.0)

    def answer(self, prompt: Int32Array, index: int) -> Answer:
        synchronize(self._engine.model)
        started = time.perf_counter()
        [sequence] = self._run([prompt], index)
        seconds = time.perf_counter() - started
        return Answer(list(sequence.output), seconds, sequence.stats.decode_steps, sequence.stats.draft_tokens)

    def answer_together(self, prompts: Iterable[Int32Array], seed: int) -> list[list[int]]:
        """Answers prompts in one batch; the strategy learns from them as in a service."""
        return [list(sequence.output) for sequence in self._run([*prompts], seed)]

    def _run(self, prompts: list[Int32Array], seed: int) -> list[Any]:
        running = sequences(prompts, self._task, self._strategy, seed=seed, **self._request)
        finish(self._engine, running)
        for sequence in running:
            if reason := sequence.stats.drafting_disabled_reason:
                raise BenchmarkError(f"strategy {self.strategy!r} was switched off: {reason}")
        return running
