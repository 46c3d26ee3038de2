"""Runs the contenders of `bench speed` on the same prompts, in turn."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from draftwood_benchmarks.harness.answers import Task
from draftwood_benchmarks.harness.models import ChosenModel
from draftwood_benchmarks.harness.report import console, progress
from draftwood_benchmarks.peers.process import PeerModel, running_peer
from draftwood_benchmarks.speed.contenders import (
    Contender,
    EngineContender,
    PeerContender,
    Tally,
    TransformersContender,
)
from draftwood_benchmarks.speed.rows import PLAIN
from draftwood_model_runner.engine import Engine
from draftwood_strategies import Strategy, create
from draftwood_strategies.draft import Int32Array
from draftwood_strategies.registry import warm_up

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
                if isinstance(reference, PeerContender):
                    reference.begin(number, self.others)
            contenders = [*references, *(one for task in self.tasks for one in self._ours(task, number))]
            tallies = tallies or [Tally(contender, rounds=self.rounds) for contender in contenders]
            for tally, contender in zip(tallies, contenders, strict=True):
                tally.contender = contender
            for i, prompt in enumerate(progress(self.measured, f"measuring, round {number + 1}")):
                first = (i + number) % len(tallies)
                for tally in tallies[first:] + tallies[:first]:
                    if not tally.contender.again:
                        tally.answers.append(tally.contender.answer(prompt, i))
            again = [tally for tally in tallies if tally.contender.again]
            for i, prompt in enumerate(progress(self.measured, "measuring, the same prompts again") if again else ()):
                for tally in again:
                    tally.answers.append(tally.contender.answer(prompt, i))
        gc.unfreeze()  # else Triton reports at the exit what is not freed
        return tallies

    def _ours(self, task: Task, number: int) -> Iterator[EngineContender]:
        """Our contenders: drafting off, then each strategy, cold, warm, and for the same prompts again what it was when
        cold. All have run once, so that they are compiled."""
        gc.freeze()  # as in the service: a collection that looks through the loaded model takes 0.15 s

        def contender(
            name: str, engine: Engine, strategy: Strategy | None = None, *, warm: bool = False, again: bool = False
        ) -> EngineContender:
            return EngineContender(engine, task, name, strategy, warm=warm, number=number, again=again)

        plain = contender(PLAIN, self.engine)
        plain.answer(self.measured[0], 0)
        yield plain
        for name in self.strategies:
            warm_up(name)
            contender(name, self.engine, create(name)).answer(self.measured[0], 0)
            learning = create(name)
            yield contender(name, self.engine, learning)
            if self.others:
                strategy = create(name)
                warm = contender(name, self.engine, strategy, warm=True)
                self._warm_up(contender(name, self.teacher, strategy, warm=True), self.others[:-1])
                warm.answer_together(self.others[-1:], _LEARNING_SEED - 1)
                yield warm
                yield contender(name, self.engine, learning, warm=True, again=True)

    def _warm_up(self, contender: EngineContender, prompts: Sequence[Int32Array]) -> None:
        """Lets it answer some prompts."""
        together = self.teacher.config.max_running
        groups = [prompts[at : at + together] for at in range(0, len(prompts), together)]
        for i, group in enumerate(progress(groups, f"{contender.strategy}: answers to learn from")):
            contender.answer_together(group, _LEARNING_SEED + i * together)


@contextmanager
def references(
    chosen: ChosenModel,
    engine: Engine,
    threads: int,
    task: Task,
    peers: Sequence[tuple[str, str]],
    gguf: str | None,
    *,
    warm: bool,
) -> Iterator[list[Contender]]:
    """The contenders that are not ours; transformers not for sampled text.

    Args:
        peers: names, with what each drafts with.
        gguf: the file that llama.cpp computes; None for what the model was chosen by.
    """
    loaded = engine.model
    found: list[Contender] = []
    if task.temperature == 0.0:
        with console.status("Loading the model for transformers"):
            module = chosen.load_plain(loaded)
        lookups = (False,) if module._is_stateful else (False, True)  # which generate refuses for states
        found += [TransformersContender(module, task, threads, prompt_lookup=lookup) for lookup in lookups]
    with ExitStack() as stack:
        model = PeerModel(
            chosen.path,
            loaded.dtype,
            threads,
            weights=chosen.options.weights,
            temperature=task.temperature,
            gguf=gguf or chosen.options.model,
        )
        for name, drafts in peers:
            process = stack.enter_context(running_peer(name, replace(model, drafts=drafts), loaded.device))
            states = (False, True) if process.has_memory and warm else (False,)
            found += [PeerContender(process, task, warm=state) for state in states]
        yield found
