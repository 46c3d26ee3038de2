"""`draftwood bench never-slower`: tokens per second where drafting can bring nothing, relative to drafting off.

Random text at one stream and at many, and answers of one token. Drafting on and off alternate on the same engine, so
that other load on the machine slows both alike. Each window has prompts of its own, as the prefix cache stays on.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.table import Table

from draftwood_benchmarks.harness.models import ModelOptions, choose_model, describe, synchronize
from draftwood_benchmarks.harness.report import OtherLoad, OutputOptions, console, progress, table, warning
from draftwood_client.cli.options import command

if TYPE_CHECKING:
    from draftwood_model_runner.engine import Engine

TARGET = 0.99
RANDOM_TEMPERATURE = 2.0
"""For text that cannot be predicted; higher than any service samples at."""


class _Case(NamedTuple):
    """Sequences that run at once, each with a random prompt.

    Attributes:
        batches: how often so many sequences run, one batch after the other, in a round.
    """

    name: str
    streams: int
    prompt_tokens: int
    answer_tokens: int
    batches: int = 1


@command
def never_slower(
    model: ModelOptions,
    output: OutputOptions,
    strategy: Annotated[str, typer.Option(help="The strategy that is compared with drafting off.")] = "hybrid",
    streams: Annotated[int, typer.Option(min=2, help="Sequences at once in the last case.")] = 64,
    answer_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer in random text.")] = 100,
    prompt_tokens: Annotated[int, typer.Option(min=8, help="Tokens of a prompt whose answer is one token.")] = 512,
    rounds: Annotated[
        int,
        typer.Option(
            min=1, help="Pairs of windows, with drafting off and on, of a case; a fourth of them of many streams."
        ),
    ] = 20,
) -> None:
    """Tokens per second where drafting can bring nothing, relative to drafting off: random text, answers of one token,
    and random text in many streams.
    """
    cases = [
        _Case("random text", 1, 32, answer_tokens),
        _Case("one-token answers", 1, prompt_tokens, 1, batches=4),
        _Case("random text", streams, 32, answer_tokens),
    ]
    chosen = choose_model(model)
    with console.status("Loading the model"):
        from draftwood_model_runner.engine import Engine, EngineConfig, warm_up

        loaded = chosen.load()
        engine = Engine(loaded, EngineConfig(max_running=streams, threads=model.threads))
        warm_up(engine)
    load = OtherLoad()
    rows = [_measured(engine, case, strategy, rounds if case.streams == 1 else -(-rounds // 4)) for case in cases]
    busy, title = load.share(), describe(chosen, loaded)
    output.report(table_of(rows, f"{title}, {strategy}{warning(busy)}"), rows, model=title, busy=busy)


def _measured(engine: Engine, case: _Case, strategy: str, rounds: int) -> dict[str, Any]:
    """Medians over the rounds; "vs_off" of the ratios of neighbouring windows, "drafted" of the draft tokens that were
    verified for each token that was written."""
    off, on, drafted = list[float](), list[float](), list[float]()
    _window(engine, case, strategy, seed=2 * rounds)  # the first to touch KV memory may take twice as long
    for number in progress(range(rounds), f"{case.name}, {case.streams} streams"):
        for name in ("none", strategy) if number % 2 else (strategy, "none"):
            speed, nodes = _window(engine, case, name, seed=2 * number + (name == "none"))
            (off if name == "none" else on).append(speed)
            if name != "none":
                drafted.append(nodes)
    ratios = [mine / other for mine, other in zip(on, off, strict=True)]
    medians = [round(statistics.median(values), 3) for values in (off, on, ratios, drafted)]
    names = ("off_tokens_per_s", "tokens_per_s", "vs_off", "drafted")
    return {"case": case.name, "streams": case.streams, **dict(zip(names, medians, strict=True))}


def _window(engine: Engine, case: _Case, strategy_name: str, seed: int) -> tuple[float, float]:
    """Tokens per second, and verified draft tokens for each token, of new sequences of one tenant without a memory."""
    from draftwood_benchmarks.harness.answers import Task, finish, sequences
    from draftwood_strategies import create
    from draftwood_strategies.drafting import Drafting

    random, strategy = np.random.default_rng(seed), create(strategy_name)
    task = Task(case.answer_tokens, RANDOM_TEMPERATURE, ignore_eos=True)
    drafting = Drafting(strategy_name, max_nodes=engine.config.max_draft_nodes)
    written = drafted = 0
    synchronize(engine.model)
    began = time.perf_counter()
    for _ in range(case.batches):
        prompts = random.integers(0, engine.model.vocab_size, (case.streams, case.prompt_tokens), np.int32)
        batch = sequences([*prompts], task, strategy, drafting=drafting)
        finish(engine, batch)
        written += sum(len(sequence.output) for sequence in batch)
        drafted += sum(sequence.stats.draft_tokens for sequence in batch)
    synchronize(engine.model)
    return written / (time.perf_counter() - began), drafted / written


def table_of(rows: list[dict[str, Any]], title: str) -> Table:
    columns = {"": "{case}", "streams": "{streams}"}
    columns |= {"off tok/s": "{off_tokens_per_s:.1f}", "tok/s": "{tokens_per_s:.1f}"}
    columns |= {"x off": "{vs_off:.3f}", "target": f">= {TARGET}", "drafted a token": "{drafted:.2f}"}
    return table(f"Drafts that bring nothing\n{title}", rows, columns, texts=1)
