"""`draftwood bench speed`: tokens per second of one stream, ours, transformers' and a peer's, on the same prompts.

All contenders answer a prompt before any answers the next one, and each prompt begins with another contender, so that
other load on the machine slows all of them alike. Warm memories have learned from other prompts; cold ones start empty
and learn from the measured prompts, as in a service. The bundled model answers the others for a shape that it was grown
to, as it writes the same text. Each round starts with the memories of the first one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from draftwood_benchmarks.harness.machine import OtherLoad, warning
from draftwood_benchmarks.harness.models import ModelOptions, chosen_model, describe
from draftwood_benchmarks.harness.prompts import (
    SAMPLED,
    ContextOption,
    OwnTextOption,
    PromptsOption,
    SampledOption,
    encode,
    random_prompts,
    read_prompts,
    split,
    title_suffix,
    with_length,
)
from draftwood_benchmarks.harness.report import BenchmarkError, OutputOptions, console
from draftwood_benchmarks.peers.process import PeerDraftsOption, PeerGgufOption, PeerOption, drafts_of
from draftwood_benchmarks.speed.rows import PLAIN, rows_of, table_of
from draftwood_client.cli.options import command
from draftwood_model_runner.errors import InvalidInputError, InvalidValueError

if TYPE_CHECKING:
    from draftwood_model_runner.engine import Engine
    from draftwood_model_runner.loading.model import LoadedModel
    from draftwood_strategies.draft import Int32Array

RANDOM_TEMPERATURE = 2.0
"""For text that cannot be predicted; higher than any service samples at."""
_RANDOM_PROMPT_TOKENS = 32
_MAX_DRAFT_NODES = 48
_LIMIT, _WARM = 20, 120
_COSTLY_LIMIT, _COSTLY_WARM, _COSTLY_STRATEGY = 3, 16, "hybrid"
"""Defaults with a real vocabulary or a real context, which let a run of the shape 110m end within ten minutes."""


@dataclass(frozen=True, slots=True)
class SpeedOptions:
    """The options of the command but those of the model. `complete` gives those that are None their defaults."""

    strategy: Annotated[
        list[str] | None,
        typer.Option(
            help="A strategy to measure; may be given several times. By default all, or hybrid alone with --vocabulary"
            " or --context.",
            show_default=False,
        ),
    ] = None
    prompts: PromptsOption = None
    text: Annotated[
        Literal["prompts", "random"],
        typer.Option(help="random: random tokens, sampled at temperature 2, which no strategy can predict."),
    ] = "prompts"
    sampled: SampledOption = False
    context: ContextOption = None
    peer: PeerOption = None
    peer_drafts: PeerDraftsOption = None
    peer_gguf: PeerGgufOption = None
    rounds: Annotated[
        int, typer.Option(min=1, help="How often all prompts are answered; the table shows the spread.")
    ] = 2
    limit: Annotated[
        int,
        typer.Option(
            min=1,
            help="Measured prompts. By default 20, or 3 with --vocabulary or --context.",
            show_default=False,
        ),
    ] = None  # type: ignore[assignment]  # as `complete` leaves it
    warm: Annotated[
        int,
        typer.Option(
            min=0,
            help="Prompts after the measured ones; the warm memories learn from their answers. By default 120, or 16"
            " with --vocabulary or --context, and 0 for random text.",
            show_default=False,
        ),
    ] = None  # type: ignore[assignment]
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens per answer, at most.")] = 200
    budget: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Verify this many draft nodes in every step instead of as many as pay, to compare acceptance lengths.",
            show_default=False,
        ),
    ] = None
    own_text: OwnTextOption = 0

    @property
    def random(self) -> bool:
        """Whether the text cannot be predicted."""
        return self.text == "random"

    @property
    def peers(self) -> list[tuple[str, str]]:
        """Each peer with what it drafts with. Raises InvalidInputError."""
        return drafts_of(self.peer or [], self.peer_drafts or [])

    def complete(self, model: ModelOptions) -> SpeedOptions:
        """With defaults for this model. Raises InvalidInputError: options exclude each other."""
        costly = model.vocabulary is not None or self.context is not None
        default_warm = 0 if self.random else _COSTLY_WARM if costly else _WARM
        complete = replace(
            self,
            strategy=_strategies(self.strategy or ([_COSTLY_STRATEGY] if costly else None)),
            limit=self.limit or (_COSTLY_LIMIT if costly else _LIMIT),
            warm=default_warm if self.warm is None else self.warm,
        )
        for name, _ in complete.peers:
            if self.random and name != "vllm":
                raise InvalidInputError("--peer", name, "it decodes greedily; leave --text random out")
        if self.random and self.sampled:
            raise InvalidInputError("--sampled", True, "random text is sampled at temperature 2; leave --text out")
        if self.random and self.context is not None:
            raise InvalidInputError("--context", self.context, "prompts of random text have 32 tokens")
        return complete


@command
def speed(model: ModelOptions, output: OutputOptions, given: SpeedOptions) -> None:
    """Tokens per second of one stream: transformers' generate and prompt lookup, ours with drafting off, and every
    strategy with an empty and with a warm memory. With --sampled ours also answers by sampling.

    Ends with status 1 if float32 outputs differ from plain decoding in a single token.
    """
    options = given.complete(model)
    context = options.context
    with chosen_model(model, None if context is None else context + options.max_tokens) as chosen:
        import torch

        from draftwood_benchmarks.harness.answers import Task
        from draftwood_benchmarks.speed.measuring import Measurement, references

        with console.status("Loading the model"):
            loaded = chosen.load()
            threads = model.threads or torch.get_num_threads()
            engine = _engine(loaded, options, threads)
            small = chosen.same_text and context is None and options.warm > 1
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
        measurement = Measurement(engine, teacher, tasks, options.strategy or [], measured, others, options.rounds)
        peers, gguf, warm = options.peers, options.peer_gguf, options.warm > 0
        with references(chosen, engine, threads, task, peers, gguf, warm=warm) as found:
            load = OtherLoad()
            tallies = measurement.tallies(found)
            busy, name = load.share(), describe(chosen, loaded)
    rows = rows_of(tallies, quantized=loaded.weights in ("int8", "int4"))
    title = (
        f"{name}\n{options.limit} prompts, {options.rounds} rounds; warm: after {options.warm} others{warning(busy)}"
    )
    title += "" if options.budget is None else f"; always {options.budget} draft nodes"
    output.report(
        table_of(rows, title + title_suffix(options.own_text, context)),
        rows,
        model=name,
        text=options.text,
        vocabulary=loaded.vocab_size,
        context=context,
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
    # One long prompt is answered at a time; others are short.
    kv_tokens = None if options.context is None else 2 * (model.max_context + nodes)
    # transformers has no prefix cache, and all contenders answer the same prompts.
    config = EngineConfig(
        max_draft_nodes=nodes,
        adaptive_budget=options.budget is None,
        prefix_cache=False,
        threads=threads,
        kv_cache_tokens=kv_tokens,
    )
    return Engine(model, config)


def _strategies(wanted: list[str] | None) -> list[str]:
    from draftwood_strategies import strategy_names

    for name in wanted or []:
        if name not in strategy_names():
            raise InvalidValueError("strategy", name, f"it must be one of {', '.join(strategy_names())}")
    return [name for name in dict.fromkeys(wanted or strategy_names()) if name != PLAIN]


def _prompts(model: LoadedModel, options: SpeedOptions) -> tuple[list[Int32Array], list[Int32Array]]:
    """The prompts that are measured, and others, which stay short."""
    if options.random:
        prompts = random_prompts(options.limit + options.warm, _RANDOM_PROMPT_TOKENS, model.vocab_size)
        return split(prompts, options.limit, options.warm)
    encoded = [encode(model.tokenizer, prompt) for prompt in read_prompts(options.prompts)]
    fitting = [prompt for prompt in encoded if prompt.size + options.max_tokens <= model.max_context]
    if len(fitting) < len(encoded):
        console.print(f"{len(encoded) - len(fitting)} prompts are left out: they do not fit the model's context.")
    measured, others = split(fitting, options.limit, options.warm)
    if options.context is not None:
        measured = with_length(measured, options.context, fitting, model.max_context - options.max_tokens)
    return measured, others
