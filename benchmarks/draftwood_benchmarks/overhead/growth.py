"""Host time against what it may grow with: vocabulary, context, prompt and memory. Everything else stays the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from draftwood_benchmarks.harness.report import progress
from draftwood_benchmarks.overhead.costless import MAX_CONTEXT, CostlessRunner, costless_model, make_texts
from draftwood_benchmarks.overhead.decoding import ANSWER_TOKENS, LEARNED, learned_strategy, measured
from draftwood_benchmarks.overhead.sampling import OPTIONS, VOCABULARIES, measured_sampling
from draftwood_model_runner.engine import Engine, EngineConfig
from draftwood_model_runner.request import Request, StopParams
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies.registry import warm_up

STRATEGY = "hybrid"
CONTEXTS = (512, 4_096, 16_384, 65_536)
PROMPTS = (512, 4_096, 16_384, 65_536)
MEMORIES = (10_000, 100_000, 1_000_000)
_STEPS = 150


@dataclass(frozen=True, slots=True)
class GrowthRow:
    """Host time of one size.

    Attributes:
        grows_with: "vocabulary", "context", "prompt" or "memory".
        size: tokens of it.
        what: what was timed.
        host_us: microseconds, of one sequence; the best of the rounds.
    """

    grows_with: str
    size: int
    what: str
    host_us: float


def measured_growth(nodes: int, rounds: int, out: Console) -> list[GrowthRow]:
    """All rows, one quantity after the other."""
    warm_up(STRATEGY)
    measured(STRATEGY, 1, nodes, 10)
    step = f"a warm step, {STRATEGY}"
    rows = [*_by_vocabulary(rounds)]
    for size in progress(CONTEXTS, "context", out):
        rows.append(GrowthRow("context", size, step, _step_us(nodes, rounds, size, LEARNED)))
    for size in progress(PROMPTS, "prompt", out):
        totals, longest = zip(*(prompt_us(size) for _ in range(rounds)), strict=True)
        rows.append(GrowthRow("prompt", size, "all steps of a prompt", round(min(totals), 1)))
        rows.append(GrowthRow("prompt", size, "the longest of them", round(min(longest), 1)))
    for size in progress(MEMORIES, "memory", out):
        answers = size // ANSWER_TOKENS
        rows.append(GrowthRow("memory", size, step, _step_us(nodes, rounds, CONTEXTS[0], answers)))
    return rows


def _by_vocabulary(rounds: int) -> Iterator[GrowthRow]:
    found = {(row.vocabulary, row.top_k, row.top_p): row for row in measured_sampling(rounds)}
    for vocabulary in VOCABULARIES:
        for top_k, top_p in OPTIONS:
            row = found[vocabulary, top_k, top_p]
            what = f"choosing a token, top-k {top_k or 'off'}, top-p {top_p:g}"
            yield GrowthRow("vocabulary", vocabulary, what, round(1e3 * row.choose_ms, 1))
        yield GrowthRow("vocabulary", vocabulary, "top 8 of 49 rows", round(1e3 * row.most_probable_ms, 1))


def _step_us(nodes: int, rounds: int, context: int, learned: int) -> float:
    """Of a warm step, the best of the rounds."""
    return min(measured(STRATEGY, 1, nodes, _STEPS, context, learned).host_us for _ in range(rounds))


def prompt_us(tokens: int) -> tuple[float, float]:
    """Microseconds of host time until a prompt has its first token: over all steps, and of the longest one."""
    text = make_texts(1, tokens + MAX_CONTEXT, seed=3)
    runner = CostlessRunner(text)
    engine = Engine(costless_model(runner), EngineConfig(max_running=1))
    request = Request(request_id="prompt", prompt=text[0, :tokens].copy(), stop=StopParams(8), strategy_name=STRATEGY)
    sequence = Sequence(request, learned_strategy(STRATEGY, LEARNED))
    engine.add(sequence)
    seconds = []
    while not sequence.output:
        spent, began = runner.seconds, time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began - (runner.seconds - spent))
    engine.close()
    return 1e6 * sum(seconds), 1e6 * max(seconds)


def growth_table(rows: list[GrowthRow], title: str) -> Table:
    table = Table("grows with", "tokens", "timed", "us", title=title, title_justify="left")
    for number in (1, 3):
        table.columns[number].justify = "right"
    for row in rows:
        table.add_row(row.grows_with, f"{row.size:,}", row.what, f"{row.host_us:,.1f}")
    return table


def draw_growth(axes: Any, rows: list[GrowthRow]) -> None:
    for case in dict.fromkeys((row.grows_with, row.what) for row in rows):
        own = [row for row in rows if (row.grows_with, row.what) == case]
        label = f"{case[0]}: {case[1]}"
        axes.plot([row.size for row in own], [row.host_us for row in own], "o-", label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("tokens in the vocabulary, context, prompt or memory")
    axes.set_ylabel("microseconds of host time")
    axes.legend(fontsize=7)
