"""`draftwood bench gpu`: all that one run on a GPU can tell of the cuda runner, within minutes and without a download.

It stops at the first thing that is wrong. The file of figures is written after each section, so that a run which ends
early still brings back what it found; the log and a timeline of kernels lie beside it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from draftwood_benchmarks.gpu_sections import Plan, parts_of
from draftwood_benchmarks.harness.models import ChosenModel, ModelOptions, chosen_model
from draftwood_benchmarks.harness.prompts import PromptsOption, encode, read_prompts, read_questions
from draftwood_benchmarks.harness.report import BenchmarkError, OutputOptions, Rows, console, run_facts, table
from draftwood_benchmarks.peers.process import LOAD_TIMEOUT, MODULES, Peer, PeerError, PeerModel, running_program
from draftwood_client.cli.options import command
from draftwood_model_runner.loading.tokenizer import load_tokenizer
from draftwood_strategies.arrays import Int32Array

Dtype = Literal["bfloat16", "float16", "float32"]
_DTYPES: tuple[Dtype, ...] = ("float32", "float16", "bfloat16")
_SHORT: dict[str, Dtype] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_OF_GROWN = ("steps", "kernels", "streams", "ahead", "transformers", "exact", "compiled", "vllm")
SECTIONS = ("correctness", "attention", "drafts", *_OF_GROWN, "flips")
"""What a run that is cut short must bring back comes first."""
_LONG_ANSWERS, _OTHERS = 640, 200
"""Of prompts of the user's own: tokens of one and its answer, and how many a memory learns from."""


@command
def gpu(
    output: OutputOptions,
    shape: Annotated[
        str, typer.Option(metavar="SHAPE", help="native, 110m, 400m, 1b, 7b, 13b, 70b-layer or HxLxHEADSxINTER.")
    ] = "7b",
    dtype: Annotated[Literal["bf16", "fp16", "fp32"], typer.Option(help="Of weights and activations.")] = "bf16",
    section: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"Only this; may be given several times. {', '.join(SECTIONS)}."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="A Llama (folder, GGUF file, hub id or name) to grow instead of the bundled one."
        ),
    ] = None,
    prompts: PromptsOption = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="The least of everything, with the bundled model; also without a GPU.")
    ] = False,
) -> None:
    """Correctness against transformers, then the attention kernel against causal attention, step times against the
    bandwidth floor, and tokens per second by strategy and number of streams; last, which targets are met.
    """
    import torch

    if not torch.cuda.is_available() and not smoke:
        raise BenchmarkError("there is no CUDA device; --smoke needs none")
    for name in section or ():
        if name not in SECTIONS:
            raise BenchmarkError(f"--section must be one of {', '.join(SECTIONS)}, not {name!r}")
    report = Report(output.json_file, tuple(section or SECTIONS))
    if (log := report.beside(".log")) is not None:
        logging.basicConfig(filename=log, filemode="w", level=logging.INFO, force=True)
    measure(report, "native" if smoke else shape, _SHORT[dtype], smoke, model, prompts)


@dataclass(frozen=True, slots=True)
class Report:
    """The sections so far, printed and written to a file as they end.

    Attributes:
        wanted: the sections that are run.
    """

    path: Path | None
    wanted: tuple[str, ...]
    sections: dict[str, Any] = field(default_factory=dict)

    def beside(self, suffix: str) -> Path | None:
        """A file beside that of the figures, if there is one."""
        return None if self.path is None else self.path.with_suffix(suffix)

    def section(self, name: str, run: Callable[[], Rows]) -> None:
        if name not in self.wanted:
            return
        began = time.perf_counter()
        with console.status(name):
            rows = run()
        self.show(name, rows, f"{name} ({time.perf_counter() - began:.0f} s)")

    def show(self, name: str, rows: Rows, title: str) -> None:
        self.sections[name] = rows
        if self.path is not None:
            figures = {"run": run_facts(), "rows": self.sections.get("steps", []), **self.sections}
            self.path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        shown = [{key: float(f"{v:.3g}") if isinstance(v, float) else v for key, v in row.items()} for row in rows]
        console.print(table(title, shown, {key.replace("_", " "): f"{{{key}}}" for key in rows[0]} if rows else {}))


def measure(
    report: Report, shape: str, dtype: Dtype, smoke: bool, model: str | None = None, prompts: Path | None = None
) -> None:
    """Runs all sections; with prompts of the user's own, a memory also learns from some of them before it is asked
    others."""
    import torch

    from draftwood_benchmarks import gpu_sections as sections

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plan = sections.SMOKE if smoke else sections.Plan()
    questions, _ = read_questions()
    if prompts is not None:
        plan = replace(plan, others=_OTHERS, answer_context=_LONG_ANSWERS)
        questions = fitting(read_prompts(prompts), ModelOptions(model=model), plan)
    bandwidth = copy_bandwidth(device)
    report.sections["device"] = {
        "name": torch.cuda.get_device_name() if device.type == "cuda" else "cpu, interpreted",
        "bandwidth_gb_s": bandwidth / 1e9,
        "torch": torch.__version__,
    }

    def options(dtype: Dtype, shape: str = "native") -> ModelOptions:
        return ModelOptions(shape=shape, model=model, device=device.type, dtype=dtype, runner="cuda")

    def correctness() -> Rows:
        with chosen_model(options("float32")) as native:
            loaded = native.load()
            return sections.correctness(loaded, native.load_plain(loaded), questions, plan)

    def flips() -> Rows:
        """By dtype; interpreted, in float32 alone: Triton's interpreter rounds bfloat16 towards zero."""
        rows = []
        for each in _DTYPES[:1] if device.type == "cpu" else _DTYPES:
            with chosen_model(options(each)) as native:
                rows += sections.flips(native.load(), questions, plan)
        return rows

    report.section("correctness", correctness)
    kind = getattr(torch, "float32" if device.type == "cpu" else dtype)
    report.section("attention", lambda: sections.attention_times(device, kind, plan, bandwidth))
    report.section("drafts", lambda: sections.draft_times(device, plan))
    if {*_OF_GROWN} & {*report.wanted}:
        positions = max(plan.contexts) + plan.step_tokens
        with chosen_model(options("float32" if smoke else dtype, shape), positions) as grown:
            _grown(report, grown, questions, plan, bandwidth)
            if "vllm" in report.wanted and device.type == "cuda":
                torch.cuda.empty_cache()
                for rows in inside_vllm(grown, questions, plan, dtype):
                    report.show("vllm", rows, "vllm")
    report.section("flips", flips)
    if not smoke:
        report.show("targets", targets(report.sections), "targets")


def fitting(questions: list[str], model: ModelOptions, plan: Plan) -> list[str]:
    """Those that fit with their answers. Raises BenchmarkError if none does."""
    with chosen_model(model) as chosen:
        tokenizer = load_tokenizer(chosen.path)
    longest = plan.answer_context - plan.tokens
    short = [question for question in questions if encode(tokenizer, question).size <= longest]
    if not short:
        raise BenchmarkError(f"no prompt has {longest} tokens or fewer")
    return short


def _grown(report: Report, grown: ChosenModel, questions: list[str], plan: Plan, bandwidth: float) -> None:
    """The sections about the large model; no two copies of its weights are on the device but where two are compared."""
    if not {*_OF_GROWN[:-1]} & {*report.wanted}:
        return
    import torch

    from draftwood_benchmarks import gpu_sections as sections
    from draftwood_model_runner.loading.model import load_model

    model = grown.load()
    size = model.parameters * getattr(torch, model.dtype).itemsize

    def of_transformers(**options: Any) -> Rows:
        return sections.transformers_speed(grown.load_plain(model), model, questions, plan, **options)

    def exact() -> Rows:
        chosen = load_model(grown.path, device=model.device, dtype=model.dtype, runner="cuda", exact=True)
        return sections.exact_cost(report.sections.get("steps", []), chosen, plan, size, bandwidth)

    report.section("steps", lambda: sections.step_times(model, plan, size, bandwidth))
    report.section("kernels", lambda: sections.kernels(model, plan, report.beside(".trace.json")))
    report.section("streams", lambda: sections.streams(model, questions, plan))
    report.section("ahead", lambda: sections.streams_ahead(model, questions, plan))
    report.section("transformers", of_transformers)
    report.section("exact", exact)
    if model.device != "cpu":  # where it would compile for minutes what nobody runs
        report.section("compiled", lambda: of_transformers(cache_implementation="static"))


def copy_bandwidth(device: Any) -> float:
    """Bytes a second that a copy reads and writes."""
    import torch

    size = 2**30 if device.type == "cuda" else 2**24
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size / best


_CONTEXT, _TREE, _MANY = 2048, 64, 256


def _step(sections: Mapping[str, Rows], tokens: int, figure: str = "ms") -> float:
    return next(_figures(sections["steps"], figure, context=_CONTEXT, tokens=tokens))


def _streams(sections: Mapping[str, Rows], figure: str, **wanted: Any) -> list[float]:
    return [*_figures(sections["streams"], figure, **wanted)]


def _ahead(sections: Mapping[str, Rows], figure: str, **wanted: Any) -> float:
    return max(_figures(sections["ahead"], figure, **wanted))


def _ahead_over_off(sections: Mapping[str, Rows], memory: str) -> float:
    """Of the trie with many streams, over drafting off in steps that wait for the host."""
    off = max(_streams(sections, "tokens_per_s", streams=_MANY, strategy="none", memory=memory))
    return _ahead(sections, "tokens_per_s", streams=_MANY, strategy="trie", memory=memory) / off


def _figures(rows: Rows, figure: str, **wanted: Any) -> Iterator[float]:
    """Of the rows with the values wanted."""
    return (row[figure] for row in rows if all(row[name] == value for name, value in wanted.items()))


def _off_over_transformers(sections: Mapping[str, Rows]) -> float:
    (off,) = _streams(sections, "tokens_per_s", streams=1, strategy="none", memory="cold")
    return off / float(sections["transformers"][0]["tokens_per_s"])


_AT_MOST: dict[str, tuple[float, Callable[[Mapping[str, Rows]], float]]] = {
    "one token over the floor, context 2,048": (1.25, lambda of: _step(of, 1) / _step(of, 1, "floor_ms")),
    "64 tokens over one, context 2,048": (1.2, lambda of: _step(of, _TREE) / _step(of, 1)),
    "host at one stream, us a step": (250.0, lambda of: max(_streams(of, "host_us_per_step", streams=1))),
    "64 nodes drafted on the device for 256 streams, us": (
        60.0,
        lambda of: next(_figures(of["drafts"], "us", streams=_MANY, nodes=_TREE)),
    ),
    "share of a step that the host takes, 64 streams": (0.05, lambda of: max(_streams(of, "host_share", streams=64))),
    "begun ahead: host at one stream, us a step": (100.0, lambda of: _ahead(of, "host_us_per_step", streams=1)),
    "begun ahead: share of a step that the host takes, 256 streams": (
        0.05,
        lambda of: _ahead(of, "host_share", streams=_MANY),
    ),
}
_AT_LEAST: dict[str, tuple[float, Callable[[Mapping[str, Rows]], float]]] = {
    "drafting off over transformers, eager": (3.0, _off_over_transformers),
    "same questions again over drafting off, one stream": (
        5.4,
        lambda of: max(_streams(of, "over_off", streams=1, memory="again")),
    ),
    "throughput with drafts over without, 256 streams": (1.0, lambda of: min(_streams(of, "over_off", streams=_MANY))),
    "begun ahead: the trie cold over drafting off, 256 streams": (1.0, lambda of: _ahead_over_off(of, "cold")),
    "begun ahead: the trie warm over drafting off, 256 streams": (2.2, lambda of: _ahead_over_off(of, "warm")),
}
"""By target, the bound and the figure from the sections."""


def targets(sections: Mapping[str, Rows]) -> Rows:
    """A row for each target; None where what it is computed from was not measured."""
    rows = []
    for name, (bound, figure) in {**_AT_MOST, **_AT_LEAST}.items():
        try:
            reached: float | None = figure(sections)
        except (KeyError, StopIteration, ValueError):  # no section, no row of the step, no row of the streams
            reached = None
        met = None if reached is None else reached >= bound if name in _AT_LEAST else reached <= bound
        rows.append({"target": name, "bound": bound, "reached": reached, "met": met})
    return rows


DRAFTS = ("none", "draftwood", "suffix", "ngram-gpu", "ngram")
"""In their order: what a run that is cut short must bring back comes first."""
_WINDOW_SECONDS = 6.0
"""Of drafts without a memory, which answer their questions in turn."""


def inside_vllm(chosen: ChosenModel, questions: list[str], plan: Plan, dtype: str) -> Iterable[Rows]:
    """The rows so far, after each kind of drafts; the ratio is over vLLM without drafts. An engine that fails has a row
    with the reason.

    Args:
        dtype: "bfloat16", ...
    """
    tokenizer = load_tokenizer(chosen.path)
    prompts = [encode(tokenizer, question) for question in questions]
    rows: Rows = []
    model = PeerModel(chosen.path, dtype, threads=1, streams=max(plan.streams))
    for drafts in DRAFTS:
        console.print(f"vLLM with drafts {drafts}")
        try:
            with running_program(
                "vllm",
                MODULES["vllm"],
                LOAD_TIMEOUT,
                **asdict(replace(model, drafts=drafts)),
                device="cuda",
                max_model_len=plan.answer_context,
            ) as peer:
                rows += chain.from_iterable(_passes(peer, prompts, count, plan) for count in plan.streams)
        except PeerError as error:
            rows.append({"streams": 0, "drafts": drafts, "memory": "", "tokens_per_s": 0.0, "error": str(error)})
        off = {(row["streams"], row["memory"]): row["tokens_per_s"] for row in rows if row["drafts"] == "none"}
        for row in rows:
            plain = off.get((row["streams"], row["memory"]))
            row["over_off"] = row["tokens_per_s"] / plain if plain else None
        yield rows


def _passes(peer: Peer, prompts: list[Int32Array], count: int, plan: Plan) -> Rows:
    """Questions with an empty memory, and further ones after others were learned."""
    asked, others, further = parts_of(prompts, max(2 * count, plan.prompts), plan.others)
    rows, memory = [], f"{count} streams"
    for name, passed in (("cold", asked), ("warm", further)):
        if not passed:
            continue
        if name == "warm":
            peer.learn([prompt.tolist() for prompt in others], plan.tokens, memory)
        window = peer.load_test([prompt.tolist() for prompt in passed], plan.tokens, count, _WINDOW_SECONDS, memory)
        per_step = window.tokens / max(1, window.steps)
        row = {"streams": count, "drafts": peer.drafts, "memory": name, "tokens_per_s": window.tokens_per_s}
        rows.append(row | {"tokens_per_step": per_step, "error": ""})
    return rows
