"""`draftwood bench speed`: tokens per second of one stream, ours, transformers' and a peer's, on the same prompts.

All contenders answer a prompt before any answers the next one, and each prompt begins with another contender, so that
other load on the machine slows all of them alike. Warm memories have learned from other prompts; cold ones start empty
and learn from the measured prompts, as in a service. Each round starts with the memories of the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from draftwood_benchmarks.harness.models import ModelOptions, check_strategies, choose_model, describe
from draftwood_benchmarks.harness.prompts import SAMPLED, encode, read_prompts, split
from draftwood_benchmarks.harness.report import (
    BenchmarkError,
    OtherLoad,
    OutputOptions,
    console,
    half_range,
    table,
    warning,
)
from draftwood_benchmarks.peers.process import PLAIN, AskedOptions
from draftwood_client.cli.options import command
from draftwood_strategies.built_in import LOADED_BY

if TYPE_CHECKING:
    from draftwood_benchmarks.contenders import Contender
    from draftwood_model_runner.loading.model import LoadedModel
    from draftwood_strategies.arrays import Int32Array


_MAX_DRAFT_NODES = 48


@dataclass(frozen=True)
class SpeedOptions(AskedOptions):
    """The options of the command but those of the model."""

    strategy: Annotated[
        list[str] | None,
        typer.Option(help="A strategy to measure; may be given several times. All by default.", show_default=False),
    ] = None
    rounds: Annotated[
        int, typer.Option(min=1, help="How often all prompts are answered; the table shows the spread.")
    ] = 2
    limit: Annotated[int, typer.Option(min=1, help="Measured prompts.")] = 8
    warm: Annotated[
        int,
        typer.Option(min=0, help="Prompts after the measured ones; the warm memories learn from their answers."),
    ] = 60
    budget: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Verify this many draft nodes in every step instead of as many as pay, to compare acceptance lengths.",
            show_default=False,
        ),
    ] = None


@command
def speed(model: ModelOptions, output: OutputOptions, options: SpeedOptions) -> None:
    """Tokens per second of one stream: transformers' generate and prompt lookup, ours with drafting off, and every
    strategy with an empty and with a warm memory. With --sampled ours also answers by sampling.

    Ends with status 1 if float32 outputs differ from plain decoding in a single token.
    """
    _ = options.peers  # raises before anything is loaded
    check_strategies(name for name in options.strategy or () if name not in LOADED_BY)
    chosen = choose_model(model)
    with ExitStack() as stack:
        with console.status("Loading the model"):
            import torch

            from draftwood_benchmarks.contenders import PeerContender, TransformersContender, measure, ours
            from draftwood_benchmarks.harness.answers import Task
            from draftwood_model_runner.engine import Engine, EngineConfig, model_strategies
            from draftwood_strategies import strategy_names

            loaded = chosen.load()
            threads = model.threads or torch.get_num_threads()
            # transformers has no prefix cache, and all contenders answer the same prompts.
            config = EngineConfig(
                max_draft_nodes=options.budget or _MAX_DRAFT_NODES,
                adaptive_budget=options.budget is None,
                prefix_cache=False,
                threads=threads,
            )
            engine = Engine(loaded, config)
            module = chosen.load_plain(loaded)
        measured, others = _prompts(loaded, options)
        stack.enter_context(model_strategies(engine))
        check_strategies(options.strategy or ())
        strategies = [name for name in dict.fromkeys(options.strategy or strategy_names()) if name != PLAIN]
        tokens = options.max_tokens
        lookups = (False,) if module._is_stateful else (False, True)  # which generate refuses for states
        contenders: list[Contender] = [
            TransformersContender(module, tokens, threads, prompt_lookup=lookup) for lookup in lookups
        ]
        for peer in options.running_peers(stack, chosen, loaded.dtype, loaded.device, threads=threads):
            states = (False, True) if peer.has_memory and others else (False,)
            contenders += [PeerContender(peer, tokens, warm=warm) for warm in states]
        for task in [Task(tokens), Task(tokens, **SAMPLED)] if options.sampled else [Task(tokens)]:
            contenders += ours(engine, task, strategies, warm=bool(others))
        load = OtherLoad()
        measure(contenders, measured, others, options.rounds)
        busy, name = load.share(), describe(chosen, loaded)
    prompts = "questions" if options.prompts is None else options.prompts.stem
    rows = [row | {"prompts": prompts} for row in rows_of(contenders, quantized=loaded.weights in ("int8", "int4"))]
    title = (
        f"{name}\n{options.limit} prompts, {options.rounds} rounds; warm: after {options.warm} others{warning(busy)}"
    )
    title += "" if options.budget is None else f"; always {options.budget} draft nodes"
    output.report(
        table_of(rows, title),
        rows,
        model=name,
        vocabulary=loaded.vocab_size,
        prompts=options.limit,
        warm_prompts=options.warm,
        budget=options.budget,
        rounds=options.rounds,
        busy=busy,
    )
    if loaded.dtype == "float32" and not all(row["identical"] for row in rows if row["engine"] == "draftwood"):
        raise BenchmarkError("some outputs differ from plain decoding in float32; this is a defect, please report it")


def _prompts(model: LoadedModel, options: SpeedOptions) -> tuple[list[Int32Array], list[Int32Array]]:
    """The prompts that are measured, and others."""
    encoded = [encode(model.tokenizer, prompt) for prompt in read_prompts(options.prompts)]
    fitting = [prompt for prompt in encoded if prompt.size + options.max_tokens <= model.max_context]
    if len(fitting) < len(encoded):
        console.print(f"{len(encoded) - len(fitting)} prompts are left out: they do not fit the model's context.")
    return split(fitting, options.limit, options.warm)


def rows_of(contenders: Sequence[Contender], *, quantized: bool = False) -> list[dict[str, Any]]:
    """The rows of the report. Ratios to transformers and to the fastest peer are null if ours sampled, which they do
    not; a peer whose drafts know earlier answers is compared with warm rows alone, and none with rows of the same
    prompts "again". "sampled_vs_greedy" is the speed of sampled answers relative to that of the greedy ones of the same
    contender; null for the latter.

    "identical" and "identical_share" compare answers with those of "identical_to": transformers' greedy `generate`, or
    drafting off for sampled answers, or if our model is quantized, which is another model than transformers runs.
    "identical_to_plain" is the share of answers that equal ours with drafting off.

    Args:
        quantized: our weights are quantized.
    """
    reference = next(one for one in contenders if one.engine == "transformers")
    peers = [one for one in contenders if one.engine not in ("transformers", "draftwood")]
    own = [one for one in contenders if one.engine == "draftwood"]
    rows = []
    for one in contenders:
        plain = next(other for other in own if other.strategy == PLAIN and other.sampled == one.sampled)
        known = [] if one.sampled or one.again else [peer for peer in peers if peer.warm <= one.warm]
        greedy = next(other for other in contenders if _case(other) == _case(one) and not other.sampled)
        expected = plain if one.sampled or quantized else reference
        rows.append(
            {
                **{name: getattr(one, name) for name in ("engine", "strategy", "warm", "again", "sampled")},
                "tokens_per_s": round(one.tokens_per_s, 2),
                "tokens_per_s_min": round(one.spread[0], 2),
                "tokens_per_s_max": round(one.spread[1], 2),
                "acceptance_length": round(one.acceptance_length, 3),
                "nodes_per_step": round(one.nodes_per_step, 2),
                "vs_transformers": None if one.sampled else _ratio(one, reference),
                "vs_peer": _ratio(one, max(known, key=lambda peer: peer.tokens_per_s, default=None)),
                "vs_plain": _ratio(one, plain),
                "sampled_vs_greedy": _ratio(one, greedy) if one.sampled else None,
                "identical": one.share_like(expected) == 1.0,
                "identical_share": round(one.share_like(expected), 3),
                "identical_to": "drafting off" if expected is plain else "transformers' generate",
                "identical_to_plain": round(one.share_like(plain), 3),
            }
        )
    return rows


def _case(one: Contender) -> tuple[str, str, bool, bool]:
    """What a sampled contender and its greedy one have in common."""
    return one.engine, one.strategy, one.warm, one.again


def _ratio(one: Contender, other: Contender | None) -> float | None:
    return None if other is None else round(one.tokens_per_s / other.tokens_per_s, 3)


def label(row: dict[str, Any]) -> str:
    """Name of a row's contender in tables and pictures."""
    if row["engine"] == "transformers":
        return "HF generate" if row["strategy"] == PLAIN else "HF prompt lookup"
    if row["engine"] != "draftwood":
        drafts = f", {row['strategy']}{' warm' * row['warm']}" if row["strategy"] != PLAIN else ""
        return f"{row['engine']}{drafts}"
    memory = "asked again" if row["again"] else "warm" if row["warm"] else "cold"
    name = "drafting off" if row["strategy"] == PLAIN else f"{row['strategy']}, {memory}"
    return f"{name}, sampled" if row["sampled_vs_greedy"] is not None else name


def table_of(rows: list[dict[str, Any]], title: str) -> Table:
    peer = any(row["vs_peer"] is not None for row in rows)
    sampled = any(row["sampled_vs_greedy"] is not None for row in rows)
    columns = {"": "{label}", "tok/s": "{tokens_per_s:.1f}", "+-": "{spread:.0%}", "x HF": "{vs_transformers:.2f}"}
    columns |= {"x peer": "{vs_peer:.2f}"} if peer else {}
    columns |= {"x off": "{vs_plain:.2f}"}
    columns |= {"greedy": "{sampled_vs_greedy:.2f}"} if sampled else {}
    columns |= {"acc.": "{acceptance_length:.2f}", "nodes": "{nodes_per_step:.1f}", "same": "{identical_share:.0%}"}
    caption = (
        "+-: half the range of the rounds, - for one; HF: transformers; x HF, x off: speed relative to its"
        f" generate and to drafting off; {'x peer: to the fastest peer; ' if peer else ''}acc.: tokens per step;"
        f" nodes: draft tokens verified per step; same: answers identical to those of {rows[0]['identical_to']}"
        f"{', sampled ones to those of drafting off; greedy: relative to the same without sampling' if sampled else ''}"
    )
    shown = [{**row, "label": label(row), "spread": half_range(row) or None} for row in rows]
    return table(title, shown, columns, texts=1, caption=caption)
