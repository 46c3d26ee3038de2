"""One verified draft tree of the bundled model, with what the model made of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from draftwood_benchmarks.harness.prompts import read_questions
from draftwood_benchmarks.speed.contenders import EngineContender, Task
from draftwood_model_runner.engine import Engine, EngineConfig
from draftwood_model_runner.loading.model import LoadedModel, load_model
from draftwood_strategies import Drafter, DraftTree, Feedback, Strategy, create
from draftwood_strategies.draft import Int32Array

_TASK = Task(max_tokens=120)
_WARM, _BUDGET = 60, 10
"""Answers that the memory learns first, and draft nodes of a step: as many as a picture can show."""
_CONTEXT, _DEEPEST = 6, 5
"""Tokens before the tree that a picture shows, and levels of the tree."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the tree. `parent` is -1 for the first level; `chosen` is the model's own token after the node."""

    text: str
    parent: int
    score: float
    chosen: str
    accepted: bool


@dataclass(frozen=True, slots=True)
class Step:
    """A verified tree.

    Attributes:
        context: the last tokens before it.
        first: the model's own token after them.
        own: the token that the step adds after the accepted ones.
    """

    context: list[str]
    first: str
    nodes: list[Node]
    own: str


def recorded() -> Step:
    """The first step that shows what a tree is for. Raises LookupError if there is none."""
    model = load_model()
    engine = Engine(model, EngineConfig(max_draft_nodes=_BUDGET, adaptive_budget=False, prefix_cache=False))
    strategy = _Recorder(create("trie"))
    contender = EngineContender(engine, _TASK, "trie", strategy, warm=True)
    measured, others = (
        [model.tokenizer.encode_chat([{"role": "user", "content": one}]) for one in part] for part in read_questions()
    )
    contender.answer_together(others[:_WARM], 0)
    for number, prompt in enumerate(measured):
        strategy.drafters.clear()
        contender.answer(prompt, number)
        for step in _steps(strategy.drafters[0], model):
            if _is_clear(step.nodes):
                return step
    raise LookupError("no step of the measured questions has such a tree")


def _is_clear(nodes: list[Node]) -> bool:
    """Whether three tokens or more were accepted, beside three rejected branches, in a tree that is not too deep."""
    accepted = {at for at, node in enumerate(nodes) if node.accepted}
    branches = [at for at, node in enumerate(nodes) if at not in accepted and node.parent in {-1, *accepted}]
    depths: list[int] = []
    for node in nodes:
        depths.append(1 if node.parent < 0 else depths[node.parent] + 1)
    return len(nodes) == _BUDGET and len(accepted) > 2 and len(branches) > 2 and max(depths) <= _DEEPEST


class _Recorder:
    """A strategy that keeps what its drafters drafted and observed."""

    def __init__(self, inner: Strategy) -> None:
        self._inner = inner
        self.top_k = inner.top_k
        self.drafters: list[_RecordingDrafter] = []

    def start(self, prompt: Int32Array) -> _RecordingDrafter:
        self.drafters.append(_RecordingDrafter(self._inner.start(prompt), prompt))
        return self.drafters[-1]


class _RecordingDrafter:
    def __init__(self, inner: Drafter, prompt: Int32Array) -> None:
        self._inner = inner
        self._text = prompt.tolist()
        self._tree = DraftTree.of([])
        self.steps: list[tuple[list[int], DraftTree, Feedback, list[int]]] = []

    def propose(self, budget: int) -> DraftTree:
        self._tree = self._inner.propose(budget)
        return self._tree

    def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
        if feedback is not None:
            self.steps.append((self._text[-_CONTEXT:], self._tree, feedback, accepted.tolist()))
        self._text += accepted.tolist()
        self._inner.observe(accepted, feedback)

    def close(self) -> None:
        self._inner.close()


def _steps(drafter: _RecordingDrafter, model: LoadedModel) -> Iterator[Step]:
    def text(token: int) -> str:
        return model.tokenizer.decode(np.array([token], np.int32)).strip(" ").replace("\n", "↵") or "␣"

    for context, proposed, feedback, written in drafter.steps:
        scores = dict(zip(_paths(proposed.tokens, proposed.parents), proposed.scores.tolist(), strict=True))
        tokens, parents = feedback.tokens[1:], feedback.parents[1:] - 1
        nodes = [
            Node(
                text(path[-1]),
                int(parents[at]),
                scores[path],
                text(int(feedback.predictions[at + 1])),
                _begins(written, path),
            )
            for at, path in enumerate(_paths(tokens, parents))
        ]
        yield Step([text(token) for token in context], text(int(feedback.predictions[0])), nodes, text(written[-1]))


def _paths(tokens: Int32Array, parents: Int32Array) -> list[tuple[int, ...]]:
    """The tokens from the root to each node."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def _begins(written: list[int], path: tuple[int, ...]) -> bool:
    """Whether the path was accepted: the step wrote it and one token more."""
    return len(path) < len(written) and written[: len(path)] == list(path)
