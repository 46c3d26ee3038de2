"""`draftwood bench speed`: tokens per second of one stream, ours, transformers' and a peer's, on the same prompts.

All contenders answer a prompt before any answers the next one, and each prompt begins with another contender, so that
other load on the machine slows all of them alike. Warm memories have learned from other prompts; cold ones start empty
and learn from the measured prompts, as in a service. Each round starts with the memories of the first one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from draftwood_benchmarks.peers.process import DRAFTS_HELP, PeerModel, PeerName, check_drafts, started_peer
from draftwood_benchmarks.shared.machine import OtherLoad, warning
from draftwood_benchmarks.shared.models import ChosenModel, ModelOptions, chosen_model, describe
from draftwood_benchmarks.shared.report import BenchmarkError, OutputOptions, console, progress
from draftwood_benchmarks.speed.rows import PLAIN, draw, rows_of, table_of
from draftwood_client.cli.options import command
from draftwood_model_runner.errors import InvalidInputError, InvalidValueError

if TYPE_CHECKING:
    from draftwood_benchmarks.speed.contenders import Contender, EngineContender, Tally, Task
    from draftwood_model_runner.engine import Engine
    from draftwood_model_runner.loading.model import LoadedModel
    from draftwood_strategies.draft import Int32Array

RANDOM_TEMPERATURE = 2.0
"""For text that cannot be predicted; higher than any service samples at."""
_RANDOM_PROMPT_TOKENS = 32
_LEARNING_SEED = 1_000_000
"""First seed of the warm-up answers; the seed of a measured answer is the index of its prompt."""


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
        typer.Option(help="random: random tokens, sampled at temperature 2, which no strategy can predict."),
    ] = "prompts",
    peer: Annotated[
        PeerName | None, typer.Option(help="Another engine to measure as well; `make peers` installs it.")
    ] = None,
    peer_drafts: Annotated[
        list[str] | None, typer.Option(help=f"{DRAFTS_HELP}. none by default.", show_default=False)
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="How often all prompts are answered; the table shows the spread.")
    ] = 2,
    limit: Annotated[int, typer.Option(min=1, help="Measured prompts.")] = 20,
    warm: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Prompts after the measured ones; the warm memories learn from their answers. By default 120, and 0"
            " for random text.",
            show_default=False,
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens per answer, at most.")] = 200,
    max_draft_nodes: Annotated[int, typer.Option(min=1, help="Draft nodes per step, at most.")] = 48,
    budget: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Verify this many draft nodes in every step instead of as many as pay, to compare acceptance lengths.",
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
    check_drafts(peer, peer_drafts or [])
    if peer == "openvino-genai" and text == "random":
        raise InvalidInputError("--peer", peer, "peers decode greedily; leave --text random out")
    with chosen_model(model, out) as chosen:
        import torch

        from draftwood_benchmarks.speed.contenders import Task
        from draftwood_model_runner.engine import Engine, EngineConfig

        with out.status("Loading the model"):
            loaded = chosen.load()
            threads = model.threads or torch.get_num_threads()
            # transformers has no prefix cache, and all contenders answer the same prompts.
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
        with _references(out, chosen, loaded, threads, task, peer, peer_drafts or ["none"], warm) as references:
            load = OtherLoad()
            tallies = _measure(out, engine, references, task, names, measured, others, rounds)
            busy = load.share()
    rows = rows_of(tallies, quantized=loaded.weights == "int8")
    name = describe(chosen, loaded)
    title = f"{name}\n{limit} prompts, {rounds} rounds; warm: after {warm} others{warning(busy)}"
    if budget is not None:
        title += f"; always {budget} draft nodes"
    out.print(table_of(rows, title))
    run = {"model": name, "text": text, "warm_prompts": warm, "budget": budget, "rounds": rounds, "busy": busy}
    output.write(rows, lambda axes: draw(rows, title, axes), **run)
    if loaded.dtype == "float32" and not all(row["identical"] for row in rows if row["engine"] == "draftwood"):
        raise BenchmarkError("some outputs differ from plain decoding in float32; this is a defect, please report it")


def _strategies(wanted: list[str] | None) -> list[str]:
    from draftwood_strategies import strategy_names

    for name in wanted or []:
        if name not in strategy_names():
            raise InvalidValueError("strategy", name, f"it must be one of {', '.join(strategy_names())}")
    return [name for name in dict.fromkeys(wanted or strategy_names()) if name != PLAIN]


def _random(model: LoadedModel, limit: int, warm: int) -> tuple[list[Int32Array], list[Int32Array]]:
    from draftwood_benchmarks.shared.prompts import random_prompts, split

    return split(random_prompts(limit + warm, _RANDOM_PROMPT_TOKENS, model.vocab_size), limit, warm)


def _read(
    out: Console, path: Path | None, model: LoadedModel, max_tokens: int, limit: int, warm: int
) -> tuple[list[Int32Array], list[Int32Array]]:
    from draftwood_benchmarks.shared.prompts import encode, read_prompts, split

    encoded = [encode(model.tokenizer, prompt) for prompt in read_prompts(path)]
    fitting = [prompt for prompt in encoded if prompt.size + max_tokens <= model.max_context]
    if len(fitting) < len(encoded):
        out.print(f"{len(encoded) - len(fitting)} prompts are left out: they do not fit the model's context.")
    return split(fitting, limit, warm)


@contextmanager
def _references(
    out: Console,
    chosen: ChosenModel,
    loaded: LoadedModel,
    threads: int,
    task: Task,
    peer: str | None,
    drafts: list[str],
    warm: int,
) -> Iterator[list[Contender]]:
    """The contenders that are not ours; transformers not for sampled text."""
    from draftwood_benchmarks.speed.contenders import PeerContender, TransformersContender

    references: list[Contender] = []
    if task.temperature == 0.0:
        with out.status("Loading the model for transformers"):
            module = chosen.load_plain(loaded)
        references += [
            TransformersContender(module, loaded, task, threads, prompt_lookup=lookup) for lookup in (False, True)
        ]
    if peer is None:
        yield references
        return
    with ExitStack() as stack:
        for one in dict.fromkeys(drafts):
            peer_model = PeerModel(chosen.path, loaded.dtype, threads, weights=chosen.options.weights, drafts=one)
            peer_model = replace(peer_model, temperature=task.temperature)
            process = stack.enter_context(started_peer(peer, loaded.device, peer_model, out))
            states = (False, True) if process.remembers and warm else (False,)
            references += [PeerContender(process, task, warm=state) for state in states]
        yield references


def _measure(
    out: Console,
    engine: Engine,
    references: list[Contender],
    task: Task,
    names: list[str],
    measured: list[Int32Array],
    others: list[Int32Array],
    rounds: int,
) -> list[Tally]:
    """All tallies, in the order of the report."""
    from draftwood_benchmarks.speed.contenders import PeerContender, Tally

    for reference in references:
        reference.answer(measured[0], 0)  # the first run is slower
    tallies: list[Tally] = []
    for number in range(rounds):
        for reference in references:
            if isinstance(reference, PeerContender):
                reference.begin(number, others)
        contenders = [*references, *_ours(out, engine, task, names, measured, others, number)]
        tallies = tallies or [Tally(contender, rounds=rounds) for contender in contenders]
        for tally, contender in zip(tallies, contenders, strict=True):
            tally.contender = contender
        for i, prompt in enumerate(progress(measured, f"measuring, round {number + 1}", out)):
            first = (i + number) % len(tallies)
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
    number: int,
) -> list[EngineContender]:
    """Our contenders: drafting off, then each strategy, cold and warm. All have run once, so that they are compiled."""
    from draftwood_benchmarks.speed.contenders import EngineContender
    from draftwood_strategies import create
    from draftwood_strategies.registry import warm_up

    gc.freeze()  # as in the service: a collection that looks through the loaded model takes 0.15 s
    contenders = [EngineContender(engine, task, PLAIN, None, warm=False, number=number)]
    contenders[0].answer(measured[0], 0)
    for name in names:
        warm_up(name)
        EngineContender(engine, task, name, create(name), warm=False, number=number).answer(measured[0], 0)
        contenders.append(EngineContender(engine, task, name, create(name), warm=False, number=number))
        if others:
            contender = EngineContender(engine, task, name, create(name), warm=True, number=number)
            together = engine.config.max_running
            groups = [others[at : at + together] for at in range(0, len(others), together)]
            for i, group in enumerate(progress(groups, f"{name}: answers to learn from", out)):
                contender.answer_together(group, _LEARNING_SEED + i * together)
            contenders.append(contender)
    return contenders
