"""Fits the weights that a hybrid starts from, the prior in `strategies/draftwood_strategies/mixing/candidates.py`.

    python tools/fit_source_weights.py gsm8k.jsonl --limit 60

The bundled model answers the prompts of the files and the questions that the demo warms up with, never the ones that
are measured. Memories start empty in each session; the weights, which start at nothing, go on learning. Their means
over the later sessions, each cell weighed by how far it moved, are printed as the constants of the prior.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from draftwood_benchmarks.harness.answers import Task, finish, sequences
from draftwood_benchmarks.harness.prompts import encode, read_prompts, read_questions
from draftwood_model_runner.engine import Engine, EngineConfig
from draftwood_model_runner.loading.model import BUNDLED_MODEL, load_model
from draftwood_strategies import HybridStrategy
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.drafting import Drafting
from draftwood_strategies.mixing.candidates import CHANCE_BINS, LEVELS, SOURCES, Weights
from draftwood_strategies.successors import ORDERS, STEADY_BINS, WIDTH

BUDGETS = (16, 32, 64)
STEP = 0.05
"""What the printed constants are rounded to."""

Table = npt.NDArray[np.float64]


def blank_weights() -> Weights:
    """Weights without a prior: all ranks alike, every source's logarithm counted by half."""
    return Weights(
        ranks=np.zeros((LEVELS, ORDERS + 1, ORDERS, STEADY_BINS, WIDTH), np.float32),
        escapes=np.ones((LEVELS, ORDERS + 1), np.float32),
        trust=np.full((SOURCES, LEVELS), 0.5, np.float32),
        bias=np.zeros((SOURCES, LEVELS, CHANCE_BINS), np.float32),
        seen=np.zeros((LEVELS, ORDERS + 1), np.float32),
    )


def learn(engine: Engine, sessions: list[list[Int32Array]], max_tokens: int) -> tuple[Weights, Weights]:
    """The mean weights over the later half of the sessions, and how far each moved in all of them."""
    weights = blank_weights()
    moved = Weights(*(np.zeros(table.shape, np.float32) for table in weights))
    total = Weights(*(np.zeros(table.shape, np.float32) for table in weights))
    later = range(len(sessions) // 2, len(sessions))
    for number, prompts in enumerate(sessions):
        before = [table.copy() for table in weights]
        strategy = HybridStrategy()
        strategy.mixture.learned.set(weights)
        budget = BUDGETS[number % len(BUDGETS)]
        for prompt in prompts:
            asked = sequences([prompt], Task(max_tokens), strategy, drafting=Drafting("hybrid", max_nodes=budget))
            finish(engine, asked)
        for table, old, way, sum_ in zip(weights, before, moved, total, strict=True):
            way += np.abs(table - old)
            if number in later:
                sum_ += table / len(later)
    return total, moved


def constants(weights: Weights, moved: Weights) -> dict[str, object]:
    """The constants of `prior_weights`, by name."""
    best_first: list[float] = []
    best_slope: list[float] = []
    other_first: list[float] = []
    other_slope: list[float] = []
    for level in range(LEVELS):
        for first, slope, own in ((best_first, best_slope, True), (other_first, other_slope, False)):
            at = [_mean(weights, moved, level, own, steady, 0) for steady in range(STEADY_BINS)]
            steepness, start = np.polyfit(np.arange(STEADY_BINS), at, 1)
            first.append(float(start))
            slope.append(float(steepness))
    best, other = (
        [_mean(weights, moved, slice(None), own, slice(None), rank) for rank in range(1, WIDTH)]
        for own in (True, False)
    )
    return {
        "_BEST_ROW": _rounded([float(np.mean(best_first)), *best]),
        "_OTHER_ROWS": _rounded([other_first[0], *other]),
        "_FIRST_OF_OTHER_ROWS": _rounded(other_first),
        "_BEST_PER_STEADY_BIN": _rounded(best_slope),
        "_OTHER_PER_STEADY_BIN": _rounded(other_slope),
        "_ESCAPES": tuple(_rounded(row) for row in weights.escapes.tolist()),
        "_TRUST": _rounded(weights.trust[0].tolist()),
        "_BIAS": _rounded(np.average(weights.bias[0], axis=1, weights=moved.bias[0] + 1e-9).tolist()),
    }


def _mean(weights: Weights, moved: Weights, level: Any, own: bool, steady: Any, rank: int) -> float:
    """The mean weight of a rank in the rows of the longest known context (`own`), or in those of shorter ones."""
    values, ways = [], []
    for longest in range(1, ORDERS + 1):
        orders = [longest - 1] if own else [*range(longest - 1)]
        values.append(weights.ranks[level, longest][..., orders, steady, rank].ravel())
        ways.append(moved.ranks[level, longest][..., orders, steady, rank].ravel())
    return float(np.average(np.concatenate(values), weights=np.concatenate(ways) + 1e-9))


def _rounded(values: list[float]) -> tuple[float, ...]:
    return tuple(round(round(value / STEP) * STEP, 2) for value in values)


def fit(
    files: Annotated[list[Path] | None, typer.Argument(help="Further prompts, as for `draftwood bench speed`.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each file.")] = 60,
    session: Annotated[int, typer.Option(min=1, help="Answers until the memories are emptied.")] = 20,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 200,
) -> None:
    """Print the constants of the prior in strategies/draftwood_strategies/mixing/candidates.py."""
    model = load_model(BUNDLED_MODEL, device="cpu", dtype="float32")
    most = max(BUDGETS)
    engine = Engine(model, EngineConfig(max_draft_nodes=most, adaptive_budget=False, prefix_cache=False))
    texts = [read_questions()[1], *(read_prompts(path)[:limit] for path in files or [])]
    sessions = []
    for kind in texts:
        prompts = [encode(model.tokenizer, text) for text in kind]
        prompts = [prompt for prompt in prompts if prompt.size + max_tokens <= model.max_context]
        sessions.append([prompts[at : at + session] for at in range(0, len(prompts), session)])
    # Sessions of all kinds are interleaved, the rarer ones spread out.
    placed = [((n + 0.5) / len(kind), prompts) for kind in sessions for n, prompts in enumerate(kind)]
    ordered = [prompts for _, prompts in sorted(placed, key=lambda pair: pair[0])]
    for name, value in constants(*learn(engine, ordered, max_tokens)).items():
        typer.echo(f"{name} = {value}")


if __name__ == "__main__":
    typer.run(fit)
