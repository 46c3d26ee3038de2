"""`draftwood demo`: customer-support questions through a real service, with drafting off, cold and warm.

Right before each answer with drafts, the same question is answered by transformers' own `generate` and with drafting
off, so that other load on the machine slows all three alike.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftwood_benchmarks.demo_experiment import SERVER_FLAGS, Result, run_experiment
from draftwood_benchmarks.harness.prompts import read_questions
from draftwood_benchmarks.harness.report import console as new_console
from draftwood_benchmarks.harness.report import progress, table
from draftwood_benchmarks.harness.server_process import ServerError, running_server
from draftwood_client import ChatMessage, Client, Completion
from draftwood_client.cli.apps import new_app, run

_MAX_TOKENS = 200

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

    @property
    def steps(self) -> int:
        return sum(c.drafting.steps for c in self.completions)

    def __add__(self, other: Pass) -> Pass:
        """Two passes of the same mode, joined."""
        seconds, completions = self.seconds + other.seconds, self.completions + other.completions
        return Pass(self.mode, self.outputs + other.outputs, seconds, completions)

    def row(self, plain: Pass, reference: Pass) -> dict[str, Any]:
        """The figures for `--json`; `plain` and `reference` are the passes measured beside this one."""
        drafting = [completion.drafting for completion in self.completions]
        return {
            "mode": self.mode,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "acceptance_length": round(sum(map(len, self.outputs)) / self.steps, 3),
            "nodes_per_step": round(sum(d.draft_tokens for d in drafting) / self.steps, 1),
            "draft_time_share": round(sum(d.draft_time for d in drafting) / self.seconds, 4),
            "outside_model_share": round(1 - sum(d.model_time for d in drafting) / self.seconds, 4),
            "vs_plain": round(self.tokens_per_s / plain.tokens_per_s, 2),
            "vs_transformers": round(self.tokens_per_s / reference.tokens_per_s, 2),
            "identical": self.outputs == plain.outputs == reference.outputs,
        }


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
    console = new_console()
    measured, others = read_questions()
    measured, others = measured[:questions], others[:warmup]
    with ExitStack() as stack:
        console.print("The first start after an installation compiles the strategies, which takes about a minute.")
        with console.status("Starting the service with the bundled model"):
            target = stack.enter_context(running_server("--dtype", "float32"))
        cold, warm = _measure(console, target, measured, others, show)
    result = _experiment(console, measured + others, experiment) if experiment else None
    reference, plain = cold.reference + warm.reference, cold.plain + warm.plain
    rows = [
        plain.row(plain, reference),
        *(beside.drafted.row(beside.plain, beside.reference) for beside in (cold, warm)),
    ]
    identical = all(row["identical"] for row in rows) and not (result and result.row()["differing"])
    console.print(_table(reference, rows, questions, warmup))
    console.print(
        "All outputs are identical to transformers' own greedy generate, token for token."
        if identical
        else "[bold red]Some outputs differ.[/bold red] This is a defect: please report it."
    )
    if json_file is not None:
        report: dict[str, Any] = {"rows": rows, "transformers": {"tokens_per_s": round(reference.tokens_per_s, 1)}}
        if result is not None:
            report["experiment"] = result.row()
        json_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if not identical:
        raise typer.Exit(1)


def _experiment(console: Console, questions: list[str], seconds: float) -> Result:
    with ExitStack() as stack:
        with console.status("Starting a service with an empty memory"):
            target = stack.enter_context(running_server(*SERVER_FLAGS))
        return run_experiment(console, target, questions, seconds)


@dataclass(frozen=True, slots=True)
class Beside:
    """A pass with drafts, and the passes with drafting off and by transformers that were measured beside it."""

    drafted: Pass
    plain: Pass = field(default_factory=lambda: Pass("plain"))
    reference: Pass = field(default_factory=lambda: Pass("transformers"))


def _measure(console: Console, target: str, measured: list[str], others: list[str], show: int) -> tuple[Beside, Beside]:
    """(cold, warm): with an empty memory, and with one that has learned from `others`."""
    cold, warm = Beside(Pass("cold")), Beside(Pass("warm"))
    with Client(target) as client:
        console.print(f"The service listens on {target}: {client.model_info().model}.")
        generate = _transformers_generate()

        def compare(texts: list[str], beside: Beside, tenant: str, title: str) -> None:
            for text in texts[:show]:
                _baselines(client, generate, text, beside)
                _show(console, client, text, beside.drafted, title, tenant=tenant)
            for text in progress(texts[show:], f"transformers, off, {title}", console):
                _baselines(client, generate, text, beside)
                _ask(client, text, beside.drafted, tenant=tenant, strategy="trie")

        _baselines(client, generate, (others or measured)[0], Beside(Pass("first")))  # the first run is slower
        compare(measured, cold, "demo-cold", "trie from empty memory")
        for text in progress(others, "other questions, to warm up", console):
            _ask(client, text, Pass("warm-up"), tenant="demo-warm", strategy="trie")
        compare(measured, warm, "demo-warm", "trie warm")
    return cold, warm


def _baselines(client: Client, generate: Callable[[str], tuple[int, ...]], text: str, beside: Beside) -> None:
    started = time.perf_counter()
    beside.reference.outputs.append(generate(text))
    beside.reference.seconds += time.perf_counter() - started
    _ask(client, text, beside.plain, drafting=False)


def _ask(client: Client, text: str, into: Pass, **options: Any) -> None:
    started = time.perf_counter()
    completion = client.generate([ChatMessage("user", text)], max_tokens=_MAX_TOKENS, **options)
    _add(into, completion, time.perf_counter() - started)


def _show(console: Console, client: Client, text: str, into: Pass, title: str, *, tenant: str) -> None:
    """Streams the answer to the terminal; tokens accepted from a draft are green."""
    console.print(Text.assemble((f"\n[{title}] ", "dim"), (text, "bold")))
    started = time.perf_counter()
    prompt = [ChatMessage("user", text)]
    with client.stream(prompt, max_tokens=_MAX_TOKENS, tenant=tenant, strategy="trie", token_details=True) as stream:
        for delta in stream:
            pieces = [(detail.text, "green" if detail.drafted else "") for detail in delta.details]
            console.print(Text.assemble(*pieces), end="", soft_wrap=True)
        completion = stream.completion()
    _add(into, completion, time.perf_counter() - started)
    drafting = completion.drafting
    console.print(
        Text(f"\n{len(completion.token_ids)} tokens in {drafting.steps} steps; green: accepted from a draft", "dim")
    )


def _add(into: Pass, completion: Completion, seconds: float) -> None:
    into.outputs.append(completion.token_ids)
    into.seconds += seconds
    into.completions.append(completion)


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
