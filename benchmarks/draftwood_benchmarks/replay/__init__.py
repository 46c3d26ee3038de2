"""Replays a strategy over recorded outputs: how many draft tokens would have been accepted, without running a model.

A strategy that reads only token ids proposes the same drafts in a replay as with the model that wrote the trace. Each
step drafts a tree; the longest path that the recorded output follows is accepted, plus the one token that the model's
own forward pass adds. The memory starts empty and grows over the trace.
"""

from __future__ import annotations

import gzip
import json
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from draftwood_model_runner.errors import InvalidInputError
from draftwood_strategies import DraftTree, Strategy, create
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.draft import DraftTrees
from draftwood_strategies.draft_engine.worth import best_chains
from draftwood_strategies.tree_index import NO_NODE


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replay.

    Attributes:
        steps: decoding steps, each one forward pass of the model. The first token of an output comes from the
            prefill, which is not counted.
        tokens: tokens written in the steps.
        drafted: draft tokens verified in them.
        draft_us: median time of a draft, in microseconds.
        learn_us_per_token: time in `start`, `observe` and `close` per token of prompts and outputs, in microseconds;
            0 if a peer does not tell.
        bytes_per_token: size of the strategy's memory per token in it; 0 if the strategy has no `nbytes`.
        levels: passes of models that draft, one for each level of a draft, and those that only read.
    """

    steps: int
    tokens: int
    drafted: int = 0
    draft_us: float = 0.0
    learn_us_per_token: float = 0.0
    bytes_per_token: float = 0.0
    levels: int = 0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per step."""
        return self.tokens / self.steps if self.steps else 1.0

    @property
    def drafted_per_step(self) -> float:
        """Mean draft tokens per step."""
        return self.drafted / self.steps if self.steps else 0.0


@dataclass(frozen=True, slots=True)
class ChainLimits:
    """How long chains may be.

    Attributes:
        tokens: at most.
        min_score: a token with a lower score is left out; an engine has the budget of its batch here.
    """

    tokens: int
    min_score: float = 0.0

    def chain(self, tree: DraftTree) -> DraftTree:
        """The best path of a tree within the limits."""
        plain = DraftTree(tree.tokens, tree.parents, tree.scores)
        return best_chains(DraftTrees.of([plain]), np.array([self.tokens], np.int32), self.min_score)[0]


def created(flag: str, name: str, options: Mapping[str, object] = MappingProxyType({}), of: str = "") -> Strategy:
    """A new strategy. Raises InvalidInputError: it cannot be made; names the flag, and `of` or the strategy."""
    try:
        return create(name, **options)
    except (LookupError, TypeError, ValueError) as error:
        raise InvalidInputError(flag, of or name, str(error)) from error


def accepted_length(tree: DraftTree, continuation: Int32Array) -> int:
    """Length of the longest path of the tree that `continuation`, int32[n], begins with."""
    children = {edge: node for node, edge in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))}
    node, length = NO_NODE, 0
    for token in continuation.tolist():
        child = children.get((node, token))
        if child is None:
            break
        node, length = child, length + 1
    return length


def replay(
    strategy: Strategy, recordings: Iterable[Recording], budget: int, chains: ChainLimits | None = None
) -> Replayed:
    """Replays the recordings in order, with at most `budget` draft nodes per step; `strategy` learns from each.

    Args:
        chains: draft a chain out of these nodes; None drafts the tree.
    """
    clock = time.perf_counter
    steps = tokens = drafted = seen = 0
    learning, drafting = 0.0, list[float]()
    for prompt, output in recordings:
        seen += prompt.size + output.size
        before = clock()
        drafter = strategy.start(prompt)
        drafter.observe(output[:1], None)
        learning += clock() - before
        at = 1
        while at < output.size:
            before = clock()
            tree = drafter.propose(budget)
            if chains is not None:
                tree = chains.chain(tree)
            drafting.append(clock() - before)
            length = accepted_length(tree, output[at:])
            written = output[at : at + length + 1]
            before = clock()
            drafter.observe(written, None)
            learning += clock() - before
            steps, tokens, at = steps + 1, tokens + written.size, at + written.size
            drafted += tree.tokens.size  # a plugin's tree need not be a DraftTree
        before = clock()
        drafter.close()
        learning += clock() - before
    stored = getattr(strategy, "tokens", 0)
    return Replayed(
        steps=steps,
        tokens=tokens,
        drafted=drafted,
        draft_us=statistics.median(drafting) * 1e6 if drafting else 0.0,
        learn_us_per_token=learning / seen * 1e6 if seen else 0.0,
        bytes_per_token=getattr(strategy, "nbytes", 0) / stored if stored else 0.0,
    )


Recording = tuple[Int32Array, Int32Array]
"""A prompt int32[p] and the output that followed it int32[o], neither empty."""

TRACES_HELP = "Traces: JSON lines with prompt_ids and output_ids, or files of `draftwood memory export`; or .gz."
"""Of arguments that are traces."""
_EXPORT = "draftwood_memory"
"""Key of the first line of an exported memory."""


class TraceError(InvalidInputError):
    """A trace cannot be read; the message names the file, the line and the problem."""

    def __init__(self, path: Path, problem: object) -> None:
        super().__init__("FILE", path, str(problem))


def read_trace(path: Path, limit: int | None = None) -> Iterator[Recording]:
    """The first `limit` recordings of a trace.

    Raises:
        TraceError: the file cannot be read, or a line is not a recording; an export has no answer of two tokens.
    """
    return islice(_recordings(path), limit)


def _recordings(path: Path) -> Iterator[Recording]:
    exported, recordings = False, 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                row = _row(line, path, number)
                if number == 1 and _EXPORT in row:
                    exported = True
                elif not exported:
                    yield _ids(row, "prompt_ids", path, number), _ids(row, "output_ids", path, number)
                elif row.get("kind") == "output" and (ids := _ids(row, "token_ids", path, number)).size > 1:
                    recordings += 1
                    yield ids[:1], ids[1:]
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(path, error) from error
    if exported and not recordings:
        raise TraceError(path, "the exported memory has no answer of two tokens or more")


def _row(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise TraceError(path, f"line {number}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise TraceError(path, f"line {number}: not an object")
    return row


def _ids(row: Mapping[str, object], name: str, path: Path, number: int) -> Int32Array:
    try:
        ids = np.array(row.get(name), np.int32)
    except (ValueError, TypeError, OverflowError):
        ids = np.empty(0, np.int32)
    if ids.ndim != 1 or ids.size == 0 or ids.min() < 0:
        raise TraceError(path, f"line {number}: {name} must be a list of one or more ids of at least 0")
    return ids


def trace_name(path: Path) -> str:
    """The file's name without `.jsonl` and `.gz`."""
    return path.name.removesuffix(".gz").removesuffix(".jsonl")
