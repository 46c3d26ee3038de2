"""`draftwood bench gpu`: what one run on a GPU can tell of the cuda runner, within minutes and without a download.

It stops at the first thing that is wrong. The file of figures is written after each section, so that a run which ends
early still brings back what it found; the log lies beside it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from draftwood_benchmarks.harness.models import ChosenModel, Dtype, ModelOptions, choose_model
from draftwood_benchmarks.harness.prompts import PromptsOption, encode, read_prompts, read_questions
from draftwood_benchmarks.harness.report import BenchmarkError, OutputOptions, Rows, console, table
from draftwood_benchmarks.peers.process import LOAD_TIMEOUT, MODULES, PeerError, PeerModel, running_program
from draftwood_client.cli.options import command
from draftwood_model_runner.loading.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from draftwood_benchmarks.gpu_sections import Plan

_DTYPES: dict[str, Dtype] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_OF_GROWN = ("steps", "streams", "ahead", "transformers", "exact")
SECTIONS = ("correctness", "drafts", *_OF_GROWN, "vllm")
"""What a run that is cut short must bring back comes first."""
_VLLM_DRAFTS = ("none", "draftwood", "suffix", "ngram-gpu", "ngram")
_LONG_ANSWERS, _OTHERS = 640, 200
"""Of prompts of the user's own: tokens of one and its answer, and how many a memory learns from."""


@command
def gpu(
    output: OutputOptions,
    shape: Annotated[
        str, typer.Option(metavar="SHAPE", help="native, 110m, 1b, 7b, 13b, 70b-layer or HxLxHEADSxINTER.")
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
    """Correctness against transformers, step times against the bandwidth floor, and tokens per second by strategy and
    number of streams. With prompts of your own a memory also learns from some of them before it is asked others.
    """
    import torch

    if not torch.cuda.is_available() and not smoke:
        raise BenchmarkError("there is no CUDA device; --smoke needs none")
    for name in section or ():
        if name not in SECTIONS:
            raise BenchmarkError(f"--section must be one of {', '.join(SECTIONS)}, not {name!r}")
    if output.json_file is not None:
        log = output.json_file.with_suffix(".log")
        logging.basicConfig(filename=log, filemode="w", level=logging.INFO, force=True)
    report = Report(output, tuple(section or SECTIONS))
    _measure(report, "native" if smoke else shape, "float32" if smoke else _DTYPES[dtype], smoke, model, prompts)


@dataclass(frozen=True, slots=True)
class Report:
    """The sections so far, printed and written to a file as they end.

    Attributes:
        wanted: the sections that are run.
    """

    output: OutputOptions
    wanted: tuple[str, ...]
    sections: dict[str, Any] = field(default_factory=dict)

    def section(self, name: str, run: Callable[[], Rows]) -> None:
        if name.split()[0] not in self.wanted:
            return
        began = time.perf_counter()
        with console.status(name):
            rows = self.sections[name] = run()
        self.output.write(self.sections.get("steps", []), **self.sections)
        shown = [{key: float(f"{v:.3g}") if isinstance(v, float) else v for key, v in row.items()} for row in rows]
        title = f"{name} ({time.perf_counter() - began:.0f} s)"
        console.print(table(title, shown, {key.replace("_", " "): f"{{{key}}}" for key in rows[0]} if rows else {}))


def _measure(report: Report, shape: str, dtype: Dtype, smoke: bool, model: str | None, prompts: Path | None) -> None:
    import torch

    from draftwood_benchmarks import gpu_sections as sections
    from draftwood_benchmarks.widen import grown

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = choose_model(ModelOptions(model=model, device=device.type, dtype="float32", runner="cuda"))
    plan = sections.SMOKE if smoke else sections.Plan()
    questions, _ = read_questions()
    if prompts is not None:
        plan = replace(plan, others=_OTHERS, answer_context=_LONG_ANSWERS)
        questions = _fitting(read_prompts(prompts), chosen, plan.answer_context - plan.tokens)
    bandwidth = copy_bandwidth(device)
    report.sections["device"] = {
        "name": torch.cuda.get_device_name() if device.type == "cuda" else "cpu, interpreted",
        "bandwidth_gb_s": bandwidth / 1e9,
        "torch": torch.__version__,
    }
    report.section("correctness", lambda: sections.correctness(chosen, questions, plan))
    report.section("drafts", lambda: sections.draft_times(device, plan))
    if not {*_OF_GROWN, "vllm"} & {*report.wanted}:
        return
    small = replace(chosen, options=replace(chosen.options, dtype=dtype))
    with grown(small, shape, max(plan.contexts) + plan.step_tokens) as large:
        if {*_OF_GROWN} & {*report.wanted}:
            _of_grown(report, large, questions, plan, bandwidth)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # vLLM takes the memory
            for drafts in _VLLM_DRAFTS:
                report.section(f"vllm {drafts}", lambda: _inside_vllm(drafts, large, questions, plan, dtype))  # noqa: B023


def _of_grown(report: Report, large: ChosenModel, questions: list[str], plan: Plan, bandwidth: float) -> None:
    """No two copies of the weights are on the device but for `transformers` and `exact`."""
    import torch

    from draftwood_benchmarks import gpu_sections as sections
    from draftwood_model_runner.loading.model import load_model

    model = large.load()
    size = model.parameters * getattr(torch, model.dtype).itemsize

    def exact() -> Rows:
        """Over the first contexts."""
        few = replace(plan, contexts=plan.contexts[:2], nodes=plan.nodes[::2])
        chosen = load_model(large.path, device=model.device, dtype=model.dtype, runner="cuda", exact=True)
        return sections.step_times(chosen, few, size, bandwidth)

    report.section("steps", lambda: sections.step_times(model, plan, size, bandwidth))
    report.section("streams", lambda: sections.streams(model, questions, plan))
    report.section("ahead", lambda: sections.streams_ahead(model, questions, plan))
    report.section("transformers", lambda: sections.transformers_speed(large.load_plain(model), model, questions, plan))
    report.section("exact", exact)


def _fitting(questions: list[str], chosen: ChosenModel, longest: int) -> list[str]:
    """Those with so many tokens at most. Raises BenchmarkError if none has."""
    tokenizer = load_tokenizer(chosen.path)
    short = [question for question in questions if encode(tokenizer, question).size <= longest]
    if not short:
        raise BenchmarkError(f"no prompt has {longest} tokens or fewer")
    return short


def copy_bandwidth(device: Any) -> float:
    """Bytes a second that a copy reads and writes."""
    import torch

    from draftwood_benchmarks.gpu_sections import median_seconds

    size = 2**30 if device.type == "cuda" else 2**24
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / median_seconds(lambda: target.copy_(source), 5, device)


_WINDOW_SECONDS = 6.0
"""Of drafts without a memory, which answer their questions in turn."""


def _inside_vllm(drafts: str, chosen: ChosenModel, questions: list[str], plan: Plan, dtype: str) -> Rows:
    """Questions with an empty memory, and further ones after others were learned, by the number of streams. An engine
    that fails has a row with the reason."""
    from draftwood_benchmarks.gpu_sections import parts_of

    tokenizer = load_tokenizer(chosen.path)
    prompts = [encode(tokenizer, question) for question in questions]
    model = PeerModel(chosen.path, dtype, threads=1, streams=max(plan.streams), drafts=drafts)
    options = {**asdict(model), "device": "cuda", "max_model_len": plan.answer_context}
    rows: Rows = []
    try:
        with running_program("vllm", MODULES["vllm"], LOAD_TIMEOUT, **options) as peer:
            for count in plan.streams:
                asked, others, further = parts_of(prompts, max(2 * count, plan.prompts), plan.others)
                memory = f"{count} streams"
                for name, passed in (("cold", asked), ("warm", further)):
                    if not passed:
                        continue
                    if name == "warm":
                        peer.learn([prompt.tolist() for prompt in others], plan.tokens, memory)
                    texts = [prompt.tolist() for prompt in passed]
                    window = peer.load_test(texts, plan.tokens, count, _WINDOW_SECONDS, memory)
                    row = {"streams": count, "memory": name, "tokens_per_s": window.tokens_per_s}
                    rows.append(row | {"tokens_per_step": window.tokens / max(1, window.steps), "error": ""})
    except PeerError as error:
        rows.append({"streams": 0, "memory": "", "tokens_per_s": 0.0, "tokens_per_step": 0.0, "error": str(error)})
    return rows
