"""`draftwood bench gpu`: all that one run on a GPU can tell of the cuda runner, within minutes and without a download.

It stops at the first thing that is wrong. The file of figures is written after each section, so that a run which ends
early still brings back what it found; the log and a timeline of kernels lie beside it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from draftwood_benchmarks.harness.models import ChosenModel, ModelOptions, chosen_model
from draftwood_benchmarks.harness.prompts import read_questions
from draftwood_benchmarks.harness.report import BenchmarkError, OutputOptions, console, table
from draftwood_client.cli.options import command

if TYPE_CHECKING:
    from draftwood_benchmarks.gpu.sections import Plan

Dtype = Literal["bfloat16", "float16", "float32"]
_DTYPES: tuple[Dtype, ...] = ("float32", "float16", "bfloat16")
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
LONG_SHAPES = {"13b": "5120x40x80x13824", "70b-layer": "8192x6x128x28672"}
"""Beside those of `bench step`: with heads of 64, as the bundled model has. "70b-layer" has six layers of a model of
70B, as the bundled one cannot lose any."""
SECTIONS = ("correctness", "attention", "steps", "kernels", "streams", "transformers", "exact", "compiled", "flips")
"""In their order: what a run that is cut short must bring back comes first."""
_OF_GROWN = {"steps", "kernels", "streams", "transformers", "exact", "compiled"}


@command
def gpu(
    output: OutputOptions,
    shape: Annotated[
        str, typer.Option(metavar="SHAPE", help="native, 110m, 400m, 1b, 7b, 13b, 70b-layer or HxLxHEADSxINTER.")
    ] = "7b",
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="bf16, fp16 or fp32.")] = "bf16",
    bandwidth: Annotated[
        float | None, typer.Option(min=1.0, help="GB/s of the GPU's memory; measured by a copy if left out.")
    ] = None,
    predict: Annotated[bool, typer.Option("--predict", help="Print what a model of the step's time predicts.")] = False,
    section: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"Only this; may be given several times. {', '.join(SECTIONS)}."),
    ] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="The least of everything, with the bundled model; also without a GPU.")
    ] = False,
) -> None:
    """Correctness against transformers, then the attention kernel against causal attention, step times against the
    bandwidth floor, and tokens per second by strategy and number of streams; last, which targets are met.
    """
    from draftwood_benchmarks.gpu.prediction import markdown

    out = console()
    output.check()
    if predict:
        out.print(markdown(), highlight=False, soft_wrap=True)
        return
    import torch

    if not torch.cuda.is_available() and not smoke:
        raise BenchmarkError("there is no CUDA device; --predict and --smoke need none")
    for name in section or ():
        if name not in SECTIONS:
            raise BenchmarkError(f"--section must be one of {', '.join(SECTIONS)}, not {name!r}")
    chosen_dtype = _SHORT.get(dtype, dtype)
    if chosen_dtype not in _DTYPES:
        raise BenchmarkError(f"--dtype must be one of {', '.join(_SHORT)}, not {dtype!r}")
    report = Report(out, output.json_file, tuple(section or SECTIONS))
    if (log := report.beside(".log")) is not None:
        logging.basicConfig(filename=log, filemode="w", level=logging.INFO, force=True)
    measure(report, "native" if smoke else LONG_SHAPES.get(shape, shape), chosen_dtype, bandwidth, smoke)
    output.write(report.sections.get("steps", []), **report.sections)


class Report:
    """The sections so far, printed and written to a file as they end.

    Args:
        wanted: the sections that are run.
    """

    def __init__(self, out: Any, path: Path | None, wanted: tuple[str, ...]) -> None:
        self.out, self.wanted, self._path = out, wanted, path
        self.sections: dict[str, Any] = {}

    def beside(self, suffix: str) -> Path | None:
        """A file beside that of the figures, if there is one."""
        return None if self._path is None else self._path.with_suffix(suffix)

    def section(self, name: str, run: Callable[[], list[dict[str, Any]]]) -> None:
        if name not in self.wanted:
            return
        began = time.perf_counter()
        with self.out.status(name):
            rows = run()
        self.show(name, rows, f"{name} ({time.perf_counter() - began:.0f} s)")

    def show(self, name: str, rows: list[dict[str, Any]], title: str) -> None:
        self.sections[name] = rows
        if self._path is not None:
            self._path.write_text(json.dumps(self.sections, indent=1) + "\n", encoding="utf-8")
        shown = [{key: float(f"{v:.3g}") if isinstance(v, float) else v for key, v in row.items()} for row in rows]
        self.out.print(table(title, shown, {key.replace("_", " "): f"{{{key}}}" for key in rows[0]} if rows else {}))


def measure(report: Report, shape: str, dtype: str, bandwidth: float | None, smoke: bool) -> None:
    """Runs all sections."""
    import torch

    from draftwood_benchmarks.gpu import sections
    from draftwood_benchmarks.gpu.targets import targets

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plan = sections.SMOKE if smoke else sections.Plan()
    questions, _ = read_questions()
    bytes_per_second = 1e9 * bandwidth if bandwidth else copy_bandwidth(device)
    report.sections["device"] = {
        "name": torch.cuda.get_device_name() if device.type == "cuda" else "cpu, interpreted",
        "bandwidth_gb_s": bytes_per_second / 1e9,
        "torch": torch.__version__,
    }
    small = ModelOptions(device=device.type, dtype="float32", runner="cuda")
    with chosen_model(small, report.out) as native:
        report.section("correctness", lambda: _correctness(native, questions, plan))
    kind = getattr(torch, "float32" if device.type == "cpu" else dtype)
    report.section("attention", lambda: sections.attention_times(device, kind, plan, bytes_per_second))
    if _OF_GROWN & {*report.wanted}:
        large = ModelOptions(shape=shape, device=device.type, dtype="float32" if smoke else dtype, runner="cuda")  # type: ignore[arg-type]
        with chosen_model(large, report.out, positions=max(plan.contexts) + plan.step_tokens) as grown:
            _grown(report, grown, questions, plan, bytes_per_second)
    report.section("flips", lambda: _flips(report, device.type, questions, plan))
    if not smoke:
        report.show("targets", targets(report.sections), "targets")


def _correctness(native: ChosenModel, questions: list[str], plan: Plan) -> list[dict[str, Any]]:
    from draftwood_benchmarks.gpu.sections import correctness

    model = native.load()
    return correctness(model, native.load_plain(model), questions, plan)


def _grown(report: Report, grown: ChosenModel, questions: list[str], plan: Plan, bandwidth: float) -> None:
    """The sections about the large model; no two copies of its weights are on the device but where two are compared."""
    import torch

    from draftwood_benchmarks.gpu import sections
    from draftwood_model_runner.loading.model import load_model

    model = grown.load()
    size = model.parameters * getattr(torch, model.dtype).itemsize
    report.section("steps", lambda: sections.step_times(model, plan, size, bandwidth))
    trace = report.beside(".trace.json")
    report.section("kernels", lambda: sections.kernels(model, plan, trace))
    report.section("streams", lambda: sections.streams(model, questions, plan))

    def of_transformers(**options: Any) -> list[dict[str, Any]]:
        return sections.transformers_speed(grown.load_plain(model), model, questions, plan, **options)

    def exact() -> list[dict[str, Any]]:
        chosen = load_model(grown.path, device=model.device, dtype=model.dtype, runner="cuda", exact=True)
        return sections.exact_price(report.sections.get("steps", []), chosen, plan, size, bandwidth)

    report.section("transformers", of_transformers)
    report.section("exact", exact)
    if model.device != "cpu":  # where it would compile for minutes what nobody runs
        report.section("compiled", lambda: of_transformers(cache_implementation="static"))


def _flips(report: Report, device: str, questions: list[str], plan: Plan) -> list[dict[str, Any]]:
    """By dtype; interpreted, in float32 alone: Triton's interpreter rounds bfloat16 towards zero."""
    from draftwood_benchmarks.gpu.sections import flips

    rows = []
    for dtype in _DTYPES[:1] if device == "cpu" else _DTYPES:
        options = ModelOptions(device=device, dtype=dtype, runner="cuda")
        with chosen_model(options, report.out) as native:
            rows += flips(native.load(), questions, plan)
    return rows


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
