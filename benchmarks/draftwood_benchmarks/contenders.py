"""The contenders of `bench speed`: transformers with and without prompt lookup, a peer, our engine with each strategy.

All of them continue token ids and write one answer at a time. A peer runs in a process of its own.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from draftwood_benchmarks.harness.answers import Task, finish, generate, sequences
from draftwood_benchmarks.harness.models import ChosenModel, synchronize
from draftwood_benchmarks.harness.report import BenchmarkError, console, progress
from draftwood_benchmarks.peers.process import Answer, Peer
from draftwood_benchmarks.speed import PLAIN, SpeedOptions
from draftwood_model_runner.engine import Engine
from draftwood_strategies import Strategy, create
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.drafting import Drafting
from draftwood_strategies.registry import warm_up

PROMPT_LOOKUP_TOKENS = 10
"""Draft tokens per step: the default of transformers' `PromptLookupCandidateGenerator`."""


@dataclass(eq=False)
class Contender:
    """A way to generate text. Its names are columns of the report.

    Attributes:
        warm: whether its drafts know answers to other prompts.
        again: whether they know the answers to these very prompts.
        sampled: whether it samples tokens.
    """

    engine: str
    strategy: str
    warm: bool = False
    again: bool = False
    sampled: bool = False

    def begin(self, number: int, others: Sequence[Int32Array]) -> None:
        """Begins a round with an empty memory, or one of the answers to `others`."""

    def answer(self, prompt: Int32Array, index: int) -> Answer:
        """Continues `prompt`, int32[p]; `index` is the seed where tokens are sampled."""
        raise NotImplementedError


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
        return sum(len(answer.tokens) for answer in self.answers) / sum(answer.steps for answer in self.answers)

    @property
    def nodes_per_step(self) -> float:
        return sum(answer.nodes for answer in self.answers) / sum(answer.steps for answer in self.answers)

    def share_like(self, other: Tally) -> float:
        """Share of the prompts to which both gave the same tokens."""
        pairs = zip(self.answers, other.answers, strict=True)
        return sum(mine.tokens == theirs.tokens for mine, theirs in pairs) / len(self.answers)


def _speed(answers: Sequence[Answer]) -> float:
    return sum(len(answer.tokens) for answer in answers) / sum(answer.seconds for answer in answers)


class PeerContender(Contender):
    """Another engine, in a process of its own, with drafts of its own or none."""

    def __init__(self, peer: Peer, task: Task, *, warm: bool = False) -> None:
        super().__init__(peer.name, peer.drafts, warm, sampled=task.temperature > 0.0)
        self._peer = peer
        self._max_tokens = task.max_tokens
        self._memory = ""

    def begin(self, number: int, others: Sequence[Int32Array]) -> None:
        self._memory = f"{'warm' if self.warm else 'cold'} {number}"
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
        strategy: drafts and learns; None switches drafting off.
        number: of the round. The payoff of drafts is measured by tenant, so each round is a tenant of its own.
    """

    def __init__(
        self,
        engine: Engine,
        task: Task,
        name: str,
        strategy: Strategy | None,
        *,
        warm: bool = False,
        number: int = 0,
        again: bool = False,
    ) -> None:
        super().__init__("draftwood", name, warm, again, task.temperature > 0.0)
        self._engine = engine
        self._task = task
        self._strategy = strategy
        self._request: dict[str, Any] = {
            "tenant": f"{name}, {'warm' if warm else 'cold'}, {number}{', sampled' * self.sampled}{', again' * again}",
            "drafting": Drafting(name, max_nodes=0 if strategy is None else engine.config.max_draft_nodes),
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


_LEARNING_SEED = 1_000_000
"""First seed of the warm-up answers; the seed of a measured answer is the index of its prompt."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What is measured.

    Attributes:
        teacher: answers `others`, all but the last one, for warm memories: `engine`, or one that writes the same text
            in less time.
        tasks: what each of our contenders does, the first one also what the others do.
        strategies: names of strategies, besides drafting off.
        measured: the prompts, int32[p] each.
        others: those whose answers warm memories learn from.
        rounds: how often all prompts are answered.
    """

    engine: Engine
    teacher: Engine
    tasks: Sequence[Task]
    strategies: Sequence[str]
    measured: Sequence[Int32Array]
    others: Sequence[Int32Array]
    rounds: int

    def tallies(self, references: Sequence[Contender]) -> list[Tally]:
        """All tallies, in the order of the report."""
        for reference in references:
            reference.answer(self.measured[0], 0)  # the first run is slower
        tallies: list[Tally] = []
        for number in range(self.rounds):
            for reference in references:
                reference.begin(number, self.others)
            contenders = [*references, *(ours for task in self.tasks for ours in self._ours(task, number))]
            tallies = tallies or [Tally(contender, rounds=self.rounds) for contender in contenders]
            for tally, contender in zip(tallies, contenders, strict=True):
                tally.contender = contender
            for i, prompt in enumerate(progress(self.measured, f"measuring, round {number + 1}")):
                first = (i + number) % len(tallies)
                self._answer(tallies[first:] + tallies[:first], prompt, i, again=False)
            for i, prompt in enumerate(progress(self.measured, "measuring, the same prompts again")):
                self._answer(tallies, prompt, i, again=True)
        gc.unfreeze()  # else Triton reports at the exit what is not freed
        return tallies

    def _answer(self, tallies: Sequence[Tally], prompt: Int32Array, index: int, *, again: bool) -> None:
        for tally in tallies:
            if tally.contender.again == again:
                tally.answers.append(tally.contender.answer(prompt, index))

    def _ours(self, task: Task, number: int) -> Iterator[EngineContender]:
        """Our contenders: drafting off, then each strategy, cold, warm, and for the same prompts again what it was when
        cold. All have run once, so that they are compiled."""
        gc.freeze()  # as in the service: a collection that looks through the loaded model takes 0.15 s
        plain = EngineContender(self.engine, task, PLAIN, None, number=number)
        plain.answer(self.measured[0], 0)
        yield plain
        for name in self.strategies:
            warm_up(name)
            EngineContender(self.engine, task, name, create(name), number=number).answer(self.measured[0], 0)
            learning = create(name)
            yield EngineContender(self.engine, task, name, learning, number=number)
            if self.others:
                strategy = create(name)
                warm = EngineContender(self.engine, task, name, strategy, warm=True, number=number)
                self._warm_up(EngineContender(self.teacher, task, name, strategy, warm=True, number=number))
                warm.answer_together(self.others[-1:], _LEARNING_SEED - 1)
                yield warm
                yield EngineContender(self.engine, task, name, learning, warm=True, number=number, again=True)

    def _warm_up(self, contender: EngineContender) -> None:
        """Lets it answer the other prompts but the last."""
        together, prompts = self.teacher.config.max_running, self.others[:-1]
        groups = [prompts[at : at + together] for at in range(0, len(prompts), together)]
        for i, group in enumerate(progress(groups, f"{contender.strategy}: answers to learn from")):
            contender.answer_together(group, _LEARNING_SEED + i * together)


@contextmanager
def references(
    chosen: ChosenModel, engine: Engine, threads: int, task: Task, options: SpeedOptions
) -> Iterator[list[Contender]]:
    """The contenders that are not ours; transformers not for sampled text."""
    loaded = engine.model
    contenders: list[Contender] = []
    if task.temperature == 0.0:
        with console.status("Loading the model for transformers"):
            module = chosen.load_plain(loaded)
        lookups = (False,) if module._is_stateful else (False, True)  # which generate refuses for states
        contenders += [
            TransformersContender(module, task.max_tokens, threads, prompt_lookup=lookup) for lookup in lookups
        ]
    with ExitStack() as stack:
        sampling = {"threads": threads, "temperature": task.temperature}
        for process in options.running_peers(stack, chosen, loaded.dtype, loaded.device, **sampling):
            states = (False, True) if process.has_memory and options.warm else (False,)
            contenders += [PeerContender(process, task, warm=state) for state in states]
        yield contenders
