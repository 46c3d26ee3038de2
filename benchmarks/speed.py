"""`draftwood bench speed`: tokens per second of one stream, ours and transformers', on the same prompts in one run.

The contenders take turns prompt by prompt, each time another one first, so that whatever else the machine does meets
them alike. Warm memories are filled before; cold ones grow over the measured prompts, as they do in service.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.models import ChosenModel, ModelOptions, chosen_model, describe
from benchmarks.report import BenchmarkError, OutputOptions, console, progress, shown
from draftwood_client.cli.options import command
from model_runner.errors import InvalidValueError

if TYPE_CHECKING:
    from benchmarks.contenders import Contender, EngineContender, Tally, Task
    from model_runner.engine import Engine
    from model_runner.loading.model import LoadedModel
    from strategies.draft import Int32Array

PLAIN = "none"
RANDOM_TEMPERATURE = 2.0
_RANDOM_PROMPT_TOKENS = 32
_LEARNING_SEED = 1_000_000
"""Seeds of warm-up answers begin here: those of measured ones are the prompts' numbers."""


@command
def speed(
    model: ModelOptions,
    output: OutputOptions,
    strategy: Annotated[
        list[str] | None,
        typer.Option(help="A strategy to measure; may be given several times. All by default.", show_default=False),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Prompts of your own: JSON lines or text lines. The bundled questions by default."),
    ] = None,
    text: Annotated[
        Literal["prompts", "random"],
        typer.Option(help="random: random tokens, continued at temperature 2, which nobody can predict."),
    ] = "prompts",
    limit: Annotated[int, typer.Option(min=1, help="Measured prompts.")] = 20,
    warm: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Other prompts, the next ones, whose answers the warm memories learn from. By default 120, and 0"
            " for random text.",
            show_default=False,
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens an answer.")] = 200,
    max_draft_nodes: Annotated[int, typer.Option(min=1, help="Draft nodes a step at most.")] = 48,
    budget: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Verify this many draft nodes in every step, not as many as pay: to compare acceptance lengths.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Tokens per second of one stream: transformers' generate and prompt lookup, ours with drafting off, and every
    strategy with an empty and with a warm memory.

    Ends with status 1 if float32 outputs differ from plain decoding in a single token.
    """
    out = console()
    output.check()
    warm = warm if warm is not None else 120 if text == "prompts" else 0
    names = _strategies(strategy)
    with chosen_model(model, out) as chosen:
        import torch

        from benchmarks.contenders import Task
        from model_runner.engine import Engine, EngineConfig

        with out.status("Loading the model"):
            loaded = chosen.load()
            threads = model.threads or torch.get_num_threads()
            # Without a prefix cache: transformers has none, and the contenders are asked the same.
            config = EngineConfig(
                max_draft_nodes=max_draft_nodes if budget is None else budget,
                adaptive_budget=budget is None,
                prefix_cache=False,
                threads=threads,
            )
            engine = Engine(loaded, config)
        if text == "random":
            task = Task(max_tokens, RANDOM_TEMPERATURE, ignore_eos=True)
            measured, others = _random(loaded, limit, warm)
        else:
            task = Task(max_tokens)
            measured, others = _read(out, prompts, loaded, max_tokens, limit, warm)
        tallies = _measure(out, chosen, engine, threads, task, names, measured, others)
    rows = rows_of(tallies)
    name = describe(chosen, loaded)
    title = f"{name}\n{limit} prompts; warm: after {warm} others"
    if budget is not None:
        title += f"; always {budget} draft nodes"
    out.print(_table(rows, title))
    output.write(rows, lambda axes: _draw(rows, title, axes), model=name, text=text, warm_prompts=warm, budget=budget)
    if loaded.dtype == "float32" and not all(row["identical"] for row in rows if row["engine"] == "draftwood"):
        raise BenchmarkError("some of our outputs differ from plain decoding in float32, which is a defect")


def rows_of(tallies: Sequence[Tally]) -> list[dict[str, Any]]:
    """The report's rows. Ratios are null where the run had no transformers.

    "identical" compares with transformers' greedy `generate`, or with drafting off where transformers did not run;
    "identical_share" and "identical_to_plain" are the shares of answers that are the same as those of transformers
    and as ours with drafting off.
    """
    reference = next((tally for tally in tallies if tally.contender.engine == "transformers"), None)
    plain = next(t for t in tallies if t.contender.engine == "draftwood" and t.contender.strategy == PLAIN)
    judge = plain if reference is None else reference
    return [
        {
            "engine": tally.contender.engine,
            "strategy": tally.contender.strategy,
            "warm": tally.contender.warm,
            "tokens_per_s": round(tally.tokens_per_s, 2),
            "acceptance_length": round(tally.acceptance_length, 3),
            "nodes_per_step": round(tally.nodes_per_step, 2),
            "vs_transformers": None if reference is None else round(tally.tokens_per_s / reference.tokens_per_s, 3),
            "vs_plain": round(tally.tokens_per_s / plain.tokens_per_s, 3),
            "identical": tally.share_like(judge) == 1.0,
            "identical_share": round(tally.share_like(judge), 3),
            "identical_to_plain": round(tally.share_like(plain), 3),
        }
        for tally in tallies
    ]


def _strategies(wanted: list[str] | None) -> list[str]:
    from strategies import names

    for name in wanted or []:
        if name not in names():
            raise InvalidValueError("strategy", name, f"it must be one of {', '.join(names())}")
    return [name for name in dict.fromkeys(wanted or names()) if name != PLAIN]


def _random(model: LoadedModel, limit: int, warm: int) -> tuple[list[Int32Array], list[Int32Array]]:
    from benchmarks.prompts import random_prompts, split

    return split(random_prompts(limit + warm, _RANDOM_PROMPT_TOKENS, model.vocab_size), limit, warm)


def _read(
    out: Console, path: Path | None, model: LoadedModel, max_tokens: int, limit: int, warm: int
) -> tuple[list[Int32Array], list[Int32Array]]:
    from benchmarks.prompts import encode, read_prompts, split

    encoded = [encode(model.tokenizer, prompt) for prompt in read_prompts(path)]
    fitting = [prompt for prompt in encoded if prompt.size + max_tokens <= model.max_context]
    if len(fitting) < len(encoded):
        out.print(f"{len(encoded) - len(fitting)} prompts are left out: they do not fit the model's context.")
    return split(fitting, limit, warm)


def _measure(
    out: Console,
    chosen: ChosenModel,
    engine: Engine,
    threads: int,
    task: Task,
    names: list[str],
    measured: list[Int32Array],
    others: list[Int32Array],
) -> list[Tally]:
    """The tallies, in the order of the report."""
    from benchmarks.contenders import Tally, TransformersContender

    rivals: list[Contender] = []
    if task.temperature == 0.0:
        with out.status("Loading the model for transformers"):
            module = chosen.load_plain(engine.model)
        rivals = [
            TransformersContender(module, engine.model, task, threads, prompt_lookup=lookup) for lookup in (False, True)
        ]
    contenders = [*rivals, *_ours(out, engine, task, names, measured, others)]
    for rival in rivals:
        rival.answer(measured[0], 0)  # its first run of all pays for more
    tallies = [Tally(contender) for contender in contenders]
    for i, prompt in enumerate(progress(measured, "measuring", out)):
        first = i % len(tallies)
        for tally in tallies[first:] + tallies[:first]:
            tally.answers.append(tally.contender.answer(prompt, i))
    return tallies


def _ours(
    out: Console,
    engine: Engine,
    task: Task,
    names: list[str],
    measured: list[Int32Array],
    others: list[Int32Array],
) -> list[EngineContender]:
    """Our contenders: plain, then each strategy, cold and warm. What strategies compile is compiled."""
    from benchmarks.contenders import EngineContender
    from strategies import create
    from strategies.registry import warm_up

    contenders = [EngineContender(engine, task, PLAIN, None, warm=False)]
    contenders[0].answer(measured[0], 0)
    for name in names:
        warm_up(name)
        EngineContender(engine, task, name, create(name), warm=False).answer(measured[0], 0)
        contenders.append(EngineContender(engine, task, name, create(name), warm=False))
        if others:
            contender = EngineContender(engine, task, name, create(name), warm=True)
            together = engine.config.max_running
            groups = [others[at : at + together] for at in range(0, len(others), together)]
            for i, group in enumerate(progress(groups, f"{name}: answers to learn from", out)):
                contender.learn(group, _LEARNING_SEED + i * together)
            contenders.append(contender)
    return contenders


def label(row: dict[str, Any]) -> str:
    """What a table calls a row's contender."""
    if row["engine"] == "transformers":
        return "HF generate" if row["strategy"] == PLAIN else "HF prompt lookup"
    return "drafting off" if row["strategy"] == PLAIN else f"{row['strategy']}, {'warm' if row['warm'] else 'cold'}"


def _table(rows: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for heading in ("tokens/s", "x HF", "x off", "accepted", "nodes", "same"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            label(row),
            f"{row['tokens_per_s']:.1f}",
            shown(row["vs_transformers"]),
            shown(row["vs_plain"]),
            shown(row["acceptance_length"]),
            shown(row["nodes_per_step"], 1),
            f"{row['identical_share']:.0%}",
        )
    judge = "drafting off" if rows[0]["vs_transformers"] is None else "transformers' generate"
    table.caption = (
        "HF: transformers; x HF, x off: speed against its generate and ours with drafting off; accepted: tokens a step;"
        f" nodes: draft nodes verified a step; same: answers identical to those of {judge}"
    )
    return table


def _draw(rows: list[dict[str, Any]], title: str, axes: Any) -> None:
    bars = axes.barh([label(row) for row in rows], [row["tokens_per_s"] for row in rows])
    axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second")
    axes.set_title(title, fontsize=9)
