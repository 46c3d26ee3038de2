"""`draftwood demo`: customer-support questions through a real service, with drafting off, cold and warm.

Right before each answer with drafts, the same question is answered by transformers' own `generate` and with drafting
off, so that other load on the machine slows all three alike. Last comes an experiment on live requests of two tenants.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from draftwood_benchmarks.harness.prompts import read_questions
from draftwood_benchmarks.harness.report import console, progress, table
from draftwood_benchmarks.harness.server_process import ServerError, running_server
from draftwood_client import (
    AdminClient,
    ChatMessage,
    Client,
    Completion,
    DraftConfig,
    Experiment,
    ExperimentArm,
    ExperimentReport,
)
from draftwood_client.cli.admin.report_command import rendered
from draftwood_client.cli.apps import new_app, run

_MAX_TOKENS = 200
_EXPERIMENT_FLAGS = ("--dtype", "float32", "--audit-share", "0.1", "--max-running", "4")
_BURN_IN = 1 / 8
"""Part of the time of the experiment that is not counted."""
_AT_ONCE, _EXPERIMENT_TOKENS, _AUDIT_SECONDS = 4, 60, 5.0
_PHRASINGS = {
    "acme": "{}",
    "umbrella": "Good afternoon. {} I look forward to your reply. Kind regards, a customer",
}

app = new_app()


def demo(args: list[str]) -> int:
    """The command `draftwood demo`. Returns the exit status."""
    return run(app, args, "demo", {ServerError: 1})


@dataclass(slots=True)
class Pass:
    """The measured questions in one mode.

    Attributes:
        mode: "transformers", "plain", "cold" or "warm".
        outputs: each answer's tokens.
        seconds: time to the complete answer as the client measures it, summed over the questions.
        completions: answers of the service; empty for transformers.
    """

    mode: str
    outputs: list[tuple[int, ...]] = field(default_factory=list)
    seconds: float = 0.0
    completions: list[Completion] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.outputs)) / self.seconds

    def __add__(self, other: Pass) -> Pass:
        """Two passes of the same mode, joined."""
        seconds, completions = self.seconds + other.seconds, self.completions + other.completions
        return Pass(self.mode, self.outputs + other.outputs, seconds, completions)

    def add(self, completion: Completion, seconds: float) -> None:
        self.outputs.append(completion.token_ids)
        self.completions.append(completion)
        self.seconds += seconds

    def row(self, plain: Pass, reference: Pass) -> dict[str, Any]:
        """The figures for `--json`; `plain` and `reference` are the passes measured beside this one."""
        drafting = [completion.drafting for completion in self.completions]
        steps = sum(one.steps for one in drafting)
        return {
            "mode": self.mode,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "acceptance_length": round(sum(map(len, self.outputs)) / steps, 3),
            "nodes_per_step": round(sum(d.draft_tokens for d in drafting) / steps, 1),
            "draft_time_share": round(sum(d.draft_time for d in drafting) / self.seconds, 4),
            "outside_model_share": round(1 - sum(d.model_time for d in drafting) / self.seconds, 4),
            "vs_plain": round(self.tokens_per_s / plain.tokens_per_s, 2),
            "vs_transformers": round(self.tokens_per_s / reference.tokens_per_s, 2),
            "identical": self.outputs == plain.outputs == reference.outputs,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """A pass with drafts, and the passes with drafting off and by transformers that were measured beside it."""

    drafted: Pass
    plain: Pass = field(default_factory=lambda: Pass("plain"))
    reference: Pass = field(default_factory=lambda: Pass("transformers"))


@app.command()
def _demo(
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to this file.", dir_okay=False)
    ] = None,
    questions: Annotated[int, typer.Option(min=1, max=20, help="Measured questions.")] = 20,
    warmup: Annotated[
        int, typer.Option(min=0, max=120, help="Other questions, which the warm memory learns from.")
    ] = 120,
    show: Annotated[int, typer.Option(min=0, max=20, help="Answers to show in the cold and in the warm pass.")] = 2,
    experiment: Annotated[
        float, typer.Option(min=0, max=3600, help="Seconds of live requests in the experiment; 0 for none.")
    ] = 40,
) -> None:
    """Start the service with the bundled model and send it customer-support questions: with drafting off, with the
    trie strategy and an empty memory, and with a memory that has learned from other answers. Transformers answers the
    same questions. Then an experiment compares two strategies on the live requests of two tenants.

    Ends with status 1 if any output differs from plain decoding in a single token.
    """
    measured, others = read_questions()
    measured, others = measured[:questions], others[:warmup]
    console.print("The first start after an installation compiles the strategies, which takes about a minute.")
    with _service("the bundled model", "--dtype", "float32") as target:
        cold, warm = _measure(target, measured, others, show)
    figures: dict[str, Any] = {}
    if experiment:
        with _service("an empty memory", *_EXPERIMENT_FLAGS) as target:
            figures["experiment"] = _experiment(target, measured + others, experiment)
    reference, plain = cold.reference + warm.reference, cold.plain + warm.plain
    rows = [plain.row(plain, reference), *(one.drafted.row(one.plain, one.reference) for one in (cold, warm))]
    identical = all(row["identical"] for row in rows) and not (experiment and figures["experiment"]["differing"])
    console.print(_table(reference, rows, questions, warmup))
    console.print(
        "All outputs are identical to transformers' own greedy generate, token for token."
        if identical
        else "[bold red]Some outputs differ.[/bold red] This is a defect: please report it."
    )
    if json_file is not None:
        figures = {"rows": rows, "transformers": {"tokens_per_s": round(reference.tokens_per_s, 1)}, **figures}
        json_file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if not identical:
        raise typer.Exit(1)


@contextmanager
def _service(with_what: str, *flags: str) -> Iterator[str]:
    with ExitStack() as stack:
        with console.status(f"Starting a service with {with_what}"):
            target = stack.enter_context(running_server(*flags))
        yield target


def _measure(target: str, measured: list[str], others: list[str], show: int) -> tuple[Comparison, Comparison]:
    """(cold, warm): with an empty memory, and with one that has learned from `others`."""
    cold, warm = Comparison(Pass("cold")), Comparison(Pass("warm"))
    with Client(target) as client:
        console.print(f"The service listens on {target}: {client.model_info().model}.")
        generate = _transformers_generate()

        def baselines(text: str, comparison: Comparison) -> None:
            started = time.perf_counter()
            comparison.reference.outputs.append(generate(text))
            comparison.reference.seconds += time.perf_counter() - started
            _ask(client, text, comparison.plain, drafting=False)

        def compare(comparison: Comparison, tenant: str, title: str) -> None:
            for text in measured[:show]:
                baselines(text, comparison)
                _show(client, text, comparison.drafted, title, tenant=tenant)
            for text in progress(measured[show:], f"transformers, off, {title}"):
                baselines(text, comparison)
                _ask(client, text, comparison.drafted, tenant=tenant, strategy="trie")

        baselines((others or measured)[0], Comparison(Pass("first")))  # the first run is slower
        compare(cold, "demo-cold", "trie from empty memory")
        for text in progress(others, "other questions, to warm up"):
            _ask(client, text, Pass("warm-up"), tenant="demo-warm", strategy="trie")
        compare(warm, "demo-warm", "trie warm")
    return cold, warm


def _ask(client: Client, text: str, into: Pass, **options: Any) -> None:
    started = time.perf_counter()
    completion = client.generate([ChatMessage("user", text)], max_tokens=_MAX_TOKENS, **options)
    into.add(completion, time.perf_counter() - started)


def _show(client: Client, text: str, into: Pass, title: str, *, tenant: str) -> None:
    """Streams the answer to the terminal; tokens accepted from a draft are green."""
    console.print(Text.assemble((f"\n[{title}] ", "dim"), (text, "bold")))
    started = time.perf_counter()
    prompt = [ChatMessage("user", text)]
    with client.stream(prompt, max_tokens=_MAX_TOKENS, tenant=tenant, strategy="trie", token_details=True) as stream:
        for delta in stream:
            pieces = [(detail.text, "green" if detail.drafted else "") for detail in delta.details]
            console.print(Text.assemble(*pieces), end="", soft_wrap=True)
        completion = stream.completion()
    into.add(completion, time.perf_counter() - started)
    tokens, steps = len(completion.token_ids), completion.drafting.steps
    console.print(Text(f"\n{tokens} tokens in {steps} steps; green: accepted from a draft", "dim"))


def _transformers_generate() -> Callable[[str], tuple[int, ...]]:
    """Greedy `generate` of transformers on the bundled model, as its users call it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from draftwood_model_runner.loading.model import BUNDLED_MODEL

    logging.disable_progress_bar()
    tokenizer: Any = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    model: Any = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32)

    def generate(text: str) -> tuple[int, ...]:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**inputs, max_new_tokens=_MAX_TOKENS, do_sample=False)
        return tuple(output[0, inputs["input_ids"].shape[1] :].tolist())

    return generate


def _experiment(target: str, questions: list[str], seconds: float) -> dict[str, Any]:
    """Two tenants ask for so many seconds, four requests at a time, and two strategies share the requests. Prints the
    report; returns its figures."""
    console.print(Text("\nAn experiment on live requests: trie against hybrid", "bold"))
    console.print(
        "Two tenants ask the same questions in their own words, four at a time, and ask them again. A hash of its id "
        "puts each request into one of two arms. Each tenant has a memory in each arm, which begins empty; what "
        f"arrives in the first {_BURN_IN * seconds:.0f} seconds is not counted."
    )
    arms = tuple(ExperimentArm(strategy, DraftConfig(strategy)) for strategy in ("trie", "hybrid"))
    with AdminClient(target) as admin, Client(target) as client:
        experiments = admin.experiments
        tenants = tuple(_PHRASINGS)
        experiments.create("demo", Experiment(arms=arms, tenants=tenants, burn_in=_BURN_IN * seconds))
        experiments.start("demo")
        began = time.monotonic()
        requests = _requests(client, questions, seconds)
        took = time.monotonic() - began
        time.sleep(_AUDIT_SECONDS)  # audits are made while nothing else is to do
        report: ExperimentReport = experiments.report("demo")
        experiments.stop("demo")
    audited, differing = (sum(getattr(arm, name) for arm in report.arms) for name in ("audited", "differing"))
    console.print(rendered(report))
    compared = f"{audited} of the answers were decoded again without drafts: {differing or 'none'} of them differ."
    console.print(Text(f"{requests} requests in {took:.0f} seconds. {compared}"))
    return {
        "requests": requests,
        "seconds": round(took, 1),
        "arms": {arm.arm: {"units": arm.units, **arm.metrics} for arm in report.arms},
        "audited": audited,
        "differing": differing,
        "conclusions": [*report.conclusions],
    }


def _requests(client: Client, questions: list[str], seconds: float) -> int:
    """Sends requests, some at once; returns how many."""
    asking = cycle([(tenant, words.format(text)) for text in questions for tenant, words in _PHRASINGS.items()])
    turn, end = Lock(), time.monotonic() + seconds

    def ask(_: int) -> int:
        sent = 0
        while time.monotonic() < end:
            with turn:
                tenant, text = next(asking)
            client.chat(text, max_tokens=_EXPERIMENT_TOKENS, tenant=tenant)
            sent += 1
        return sent

    with console.status(f"Live requests, {seconds:.0f} seconds"), ThreadPoolExecutor(_AT_ONCE) as pool:
        return sum(pool.map(ask, range(_AT_ONCE)))


def _table(reference: Pass, rows: list[dict[str, Any]], questions: int, warmup: int) -> Table:
    titles = {"plain": "drafting off", "cold": "trie, cold", "warm": "trie, warm"}
    ratio, speed = reference.tokens_per_s / rows[0]["tokens_per_s"], reference.tokens_per_s
    first = {"title": "transformers", "tokens_per_s": speed, "vs_plain": ratio, "vs_transformers": 1.0}
    ours = [row | {"title": titles[row["mode"]], "same": "yes" if row["identical"] else "NO"} for row in rows]
    columns = {"": "{title}", "tok/s": "{tokens_per_s:.1f}", "x off": "{vs_plain:.2f}", "x HF": "{vs_transformers:.2f}"}
    columns |= {"length": "{acceptance_length:.2f}", "nodes": "{nodes_per_step:.1f}"}
    columns |= {"draft": "{draft_time_share:.1%}", "own": "{outside_model_share:.1%}", "same": "{same}"}
    caption = (
        "x off, x HF: speed relative to drafting off and to transformers' generate, which answer each question beside"
        " it; length: acceptance length, tokens per step; nodes: draft tokens verified per step; draft, own: share of"
        " the time spent drafting, and outside of the model; same: identical token for token"
    )
    title = f"{questions} questions; warm: after {warmup} others"
    return table(title, [first, *ours], columns, texts=1, caption=caption)
