"""`draftwood bench speed`: tokens per second of one stream, ours, transformers' and a peer's, on the same prompts.

All contenders answer a prompt before any answers the next one, and each prompt begins with another contender, so that
other load on the machine slows all of them alike. Warm memories have learned from other prompts; cold ones start empty
and learn from the measured prompts, as in a service. The bundled model answers the others for a shape that it was grown
to, as it writes the same text. Each round starts with the memories of the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import typer
from rich.table import Table

from draftwood_benchmarks.harness.models import ModelOptions, check_strategies, chosen_model, describe
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
from draftwood_benchmarks.peers.process import AskedOptions
from draftwood_client.cli.options import command
from draftwood_model_runner.errors import InvalidInputError
from draftwood_strategies.built_in import LOADED_BY

if TYPE_CHECKING:
    from draftwood_benchmarks.contenders import Tally
    from draftwood_model_runner.engine import Engine
    from draftwood_model_runner.loading.model import LoadedModel
    from draftwood_strategies.arrays import Int32Array


RANDOM_TEMPERATURE = 2.0
"""For text that cannot be predicted; higher than any service samples at."""
_RANDOM_PROMPT_TOKENS = 32
_MAX_DRAFT_NODES = 48


@dataclass(frozen=True)
class SpeedOptions(AskedOptions):
    """The options of the command but those of the model."""

    strategy: Annotated[
        list[str] | None,
        typer.Option(help="A strategy to measure; may be given several times. All by default.", show_default=False),
    ] = None
    text: Annotated[
        Literal["prompts", "random"],
        typer.Option(help="random: random tokens, sampled at temperature 2, which no strategy can predict."),
    ] = "prompts"
    rounds: Annotated[
        int, typer.Option(min=1, help="How often all prompts are answered; the table shows the spread.")
    ] = 2
    limit: Annotated[int, typer.Option(min=1, help="Measured prompts.")] = 20
    warm: Annotated[
        int,
        typer.Option(
            min=0, help="Prompts after the measured ones; the warm memories learn from their answers. Not random text."
        ),
    ] = 120
    budget: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Verify this many draft nodes in every step instead of as many as pay, to compare acceptance lengths.",
            show_default=False,
        ),
    ] = None
    own_text: Annotated[
        int, typer.Option(min=0, help="Tokens that the model writes by itself first, as the setting own_text_tokens.")
    ] = 0

    @property
    def text_name(self) -> str:
        """Of what is measured, for rows."""
        return "random" if self.random else "questions" if self.prompts is None else self.prompts.stem

    @property
    def random(self) -> bool:
        """Whether the text cannot be predicted."""
        return self.text == "random"

    def checked(self) -> SpeedOptions:
        """Itself; random text warms no memory. Raises InvalidInputError: options exclude each other."""
        check_strategies(name for name in self.strategy or () if name not in LOADED_BY)
        for name, _ in self.peers:
            if self.random and name != "vllm":
                raise InvalidInputError("--peer", name, "it decodes greedily; leave --text random out")
        if self.random and self.sampled:
            raise InvalidInputError("--sampled", True, "random text is sampled at temperature 2; leave --text out")
        return replace(self, warm=0) if self.random else self


@command
def speed(model: ModelOptions, output: OutputOptions, given: SpeedOptions) -> None:
    """Tokens per second of one stream: transformers' generate and prompt lookup, ours with drafting off, and every
    strategy with an empty and with a warm memory. With --sampled ours also answers by sampling.

    Ends with status 1 if float32 outputs differ from plain decoding in a single token.
    """
    options = given.checked()
    with chosen_model(model) as chosen:
        import torch

        from draftwood_benchmarks.contenders import Measurement, references
        from draftwood_benchmarks.harness.answers import Task
        from draftwood_model_runner.engine import model_strategies

        with console.status("Loading the model"):
            loaded = chosen.load()
            threads = model.threads or torch.get_num_threads()
            engine = _engine(loaded, options, threads)
            small = chosen.same_text and options.warm > 1
            teacher = _engine(chosen.load_small(), options, threads) if small else engine
        if options.own_text:
            with console.status("Writing the model's own text"):
                own_text = teacher.own_text(options.own_text, None)
                while not own_text.done:
                    own_text.step()
                engine.set_model_table(own_text.rows)
        measured, others = _prompts(loaded, options)
        task = Task(options.max_tokens)
        if options.random:
            task = Task(options.max_tokens, RANDOM_TEMPERATURE, ignore_eos=True)
        tasks = [task, Task(options.max_tokens, **SAMPLED)] if options.sampled else [task]
        with model_strategies(engine), references(chosen, engine, threads, task, options) as other_engines:
            strategies = _strategies(options.strategy)
            measurement = Measurement(engine, teacher, tasks, strategies, measured, others, options.rounds)
            load = OtherLoad()
            tallies = measurement.tallies(other_engines)
            busy, name = load.share(), describe(chosen, loaded)
    rows = [row | {"prompts": options.text_name} for row in rows_of(tallies, quantized=_is_quantized(loaded))]
    title = (
        f"{name}\n{options.limit} prompts, {options.rounds} rounds; warm: after {options.warm} others{warning(busy)}"
    )
    title += "" if options.budget is None else f"; always {options.budget} draft nodes"
    title += f"; after {options.own_text:,} tokens of the model's own" if options.own_text else ""
    output.report(
        table_of(rows, title),
        rows,
        model=name,
        text=options.text,
        vocabulary=loaded.vocab_size,
        prompts=options.limit,
        warm_prompts=options.warm,
        budget=options.budget,
        own_text=options.own_text,
        rounds=options.rounds,
        busy=busy,
    )
    if loaded.dtype == "float32" and not all(row["identical"] for row in rows if row["engine"] == "draftwood"):
        raise BenchmarkError("some outputs differ from plain decoding in float32; this is a defect, please report it")


def _engine(model: LoadedModel, options: SpeedOptions, threads: int) -> Engine:
    from draftwood_model_runner.engine import Engine, EngineConfig

    nodes = options.budget or _MAX_DRAFT_NODES
    # transformers has no prefix cache, and all contenders answer the same prompts.
    config = EngineConfig(
        max_draft_nodes=nodes,
        adaptive_budget=options.budget is None,
        prefix_cache=False,
        threads=threads,
    )
    return Engine(model, config)


def _is_quantized(model: LoadedModel) -> bool:
    return model.weights in ("int8", "int4")


def _strategies(wanted: list[str] | None) -> list[str]:
    from draftwood_strategies import strategy_names

    check_strategies(wanted or [])
    return [name for name in dict.fromkeys(wanted or strategy_names()) if name != PLAIN]


def _prompts(model: LoadedModel, options: SpeedOptions) -> tuple[list[Int32Array], list[Int32Array]]:
    """The prompts that are measured, and others."""
    if options.random:
        shape = options.limit, _RANDOM_PROMPT_TOKENS
        return [*np.random.default_rng(0).integers(0, model.vocab_size, shape, np.int32)], []
    encoded = [encode(model.tokenizer, prompt) for prompt in read_prompts(options.prompts)]
    fitting = [prompt for prompt in encoded if prompt.size + options.max_tokens <= model.max_context]
    if len(fitting) < len(encoded):
        console.print(f"{len(encoded) - len(fitting)} prompts are left out: they do not fit the model's context.")
    return split(fitting, options.limit, options.warm)


PLAIN = "none"
"""The strategy name of drafting off."""


def rows_of(tallies: Sequence[Tally], *, quantized: bool = False) -> list[dict[str, Any]]:
    """The rows of the report. Ratios to transformers and to the fastest peer are null where they did not run, or not
    with the same sampling; a peer whose drafts know earlier answers is compared with warm rows alone, and none with
    rows of the same prompts "again".
    "sampled_vs_greedy" is the speed of sampled answers relative to that of the greedy ones of the same contender; null
    for the latter.

    "identical" and "identical_share" compare answers with those of "identical_to": transformers' greedy `generate`, or
    drafting off where transformers did not run, for sampled answers, or if our model is quantized, which is another
    model than transformers runs. "identical_to_plain" is the share of answers that equal ours with drafting off.

    Args:
        quantized: our weights are quantized.
    """
    reference = next((tally for tally in tallies if tally.contender.engine == "transformers"), None)
    peers = [tally for tally in tallies if tally.contender.engine not in ("transformers", "draftwood")]
    rows = []
    for tally in tallies:
        contender = tally.contender
        ours = [other for other in tallies if other.contender.engine == "draftwood"]
        plain = next(t for t in ours if t.contender.strategy == PLAIN and t.contender.sampled == contender.sampled)
        judge = _alike(reference, tally)
        expected = plain if judge is None or quantized else judge
        greedy = next((t for t in tallies if _case(t) == _case(tally) and not t.contender.sampled), None)
        rows.append(
            {
                **{name: getattr(contender, name) for name in ("engine", "strategy", "warm", "again", "sampled")},
                "tokens_per_s": round(tally.tokens_per_s, 2),
                "tokens_per_s_min": round(tally.spread[0], 2),
                "tokens_per_s_max": round(tally.spread[1], 2),
                "acceptance_length": round(tally.acceptance_length, 3),
                "nodes_per_step": round(tally.nodes_per_step, 2),
                "vs_transformers": _ratio(tally, judge),
                "vs_peer": _ratio(tally, _fastest(peers, tally)),
                "vs_plain": _ratio(tally, plain),
                "sampled_vs_greedy": _ratio(tally, greedy) if contender.sampled else None,
                "identical": tally.share_like(expected) == 1.0,
                "identical_share": round(tally.share_like(expected), 3),
                "identical_to": "drafting off" if expected is plain else "transformers' generate",
                "identical_to_plain": round(tally.share_like(plain), 3),
            }
        )
    return rows


def _alike(reference: Tally | None, tally: Tally) -> Tally | None:
    """The reference, if it chose tokens as this contender did."""
    return reference if reference is not None and reference.contender.sampled == tally.contender.sampled else None


def _fastest(peers: Sequence[Tally], tally: Tally) -> Tally | None:
    """The fastest of the peers that chose tokens as this contender did, and knew no more than it."""
    known = tally.contender
    alike = [peer for peer in peers if _alike(peer, tally) and peer.contender.warm <= known.warm and not known.again]
    return max(alike, key=lambda peer: peer.tokens_per_s, default=None)


def _case(tally: Tally) -> tuple[str, str, bool, bool]:
    """What a sampled contender and its greedy one have in common."""
    return tally.contender.engine, tally.contender.strategy, tally.contender.warm, tally.contender.again


def _ratio(tally: Tally, other: Tally | None) -> float | None:
    return None if other is None else round(tally.tokens_per_s / other.tokens_per_s, 3)


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
