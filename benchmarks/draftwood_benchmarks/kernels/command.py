"""`draftwood bench kernels`: the kernels of the cuda runner, compiled for GPUs and interpreted on this CPU.

Needs no GPU: Triton brings the compiler and an interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from draftwood_benchmarks.harness.report import BenchmarkError, OutputOptions, console, progress
from draftwood_client.cli.options import command

if TYPE_CHECKING:
    from draftwood_benchmarks.kernels.specialisations import Variant
    from draftwood_benchmarks.kernels.state_specialisations import StateVariant

ARCHITECTURES = (80, 89, 90, 100, 120)
SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Shared memory that a program may have, by compute capability, as the CUDA C++ Programming Guide lists it."""
MOST_SPILLS = 64
"""Bytes a thread, of which a few in the outermost loop cost nothing that can be measured. Not tuned."""
TOLERANCE = {
    **dict.fromkeys(("attention_parts", "merge_parts", "rms_norm", "silu_product", "rotate"), 1e-5),
    **dict.fromkeys(("convolve", "delta_rule", "state_space"), 2e-5),
    **dict.fromkeys(("top_of_blocks", "top_of_rows"), 0.0),
    "float16": 5e-3,
    "bfloat16": 4e-2,
}
"""Largest error that is rounding."""


@command
def kernels(
    output: OutputOptions,
    arch: Annotated[
        list[int] | None, typer.Option(min=70, help="Compute capability to compile for; may be given several times.")
    ] = None,
    head_size: Annotated[
        list[int] | None, typer.Option(min=16, max=256, help="Head size to compile for; may be given several times.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Compilers that run side by side.")] = os.cpu_count() or 1,
) -> None:
    """Compiles every kernel of the cuda runner to machine code for GPUs (compute capability 8.0, 8.9, 9.0, 10.0 and
    12.0, all head sizes and states of recurrent layers), and compares interpreted kernels with float64. Fails if a
    kernel spills registers, needs more shared memory than a GPU has, or errs by more than rounding.
    """
    from draftwood_benchmarks.kernels.specialisations import HEAD_SIZES, variants
    from draftwood_benchmarks.kernels.state_specialisations import STATE_VARIANTS

    out = console()
    output.check()
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise BenchmarkError("kernels cannot be compiled with TRITON_INTERPRET=1 in the environment")
    chosen: list[Variant | StateVariant] = [*variants(tuple(head_size or HEAD_SIZES)), *STATE_VARIANTS]
    errors = _accuracy()
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        pending = [pool.submit(compiled, one, capability) for one in chosen for capability in arch or ARCHITECTURES]
        for done in progress(pending, "variants of kernels", out):
            rows += done.result()
    rows.sort(key=lambda row: (row["kernel"], row["variant"], row["arch"]))
    for row in rows:
        row["max_error"] = errors.get(row["kernel"])
    out.print(_table(rows))
    halves = {f"{name}_error": errors[name] for name in ("float16", "bfloat16")}
    out.print(f"Largest error in float16: {errors['float16']:.1e}, in bfloat16: {errors['bfloat16']:.1e}.")
    output.write(rows, lambda axes: _draw(rows, axes), **halves)
    if problems := defects(rows, errors):
        raise BenchmarkError("; ".join(problems))


def compiled(variant: Variant | StateVariant, capability: int) -> list[dict[str, Any]]:
    """The kernels of a variant; those that depend on nothing of it only once, with the smallest heads."""
    from draftwood_benchmarks.kernels.compiling import compile_launch
    from draftwood_benchmarks.kernels.specialisations import Variant, launches_of
    from draftwood_benchmarks.kernels.state_specialisations import state_launches_of

    rows = []
    once = isinstance(variant, Variant) and variant != Variant(variant.head_size)
    launches = (
        launches_of(variant, capability) if isinstance(variant, Variant) else state_launches_of(variant, capability)
    )
    for launch in launches:
        name = launch.kernel.__name__
        if once and name not in _OF_EVERY_VARIANT:
            continue
        figures = compile_launch(launch, capability)
        rows.append({"kernel": name, "variant": str(variant), "arch": f"sm_{capability}", **figures._asdict()})
    return rows


_OF_EVERY_VARIANT = ("attention_parts", "merge_parts")


def defects(rows: list[dict[str, Any]], errors: dict[str, float]) -> list[str]:
    """What is wrong with the kernels, a sentence each."""
    found = []
    for row in rows:
        name = f"{row['kernel']} ({row['variant']}, {row['arch']})"
        if row["spills"] > MOST_SPILLS:
            found.append(f"{name} spills {row['spills']} bytes a thread")
        most = SHARED_BYTES.get(int(row["arch"].removeprefix("sm_")), min(SHARED_BYTES.values()))
        if row["shared_bytes"] > most:
            found.append(f"{name} needs {row['shared_bytes']} bytes of shared memory, there are {most}")
    found += [f"{name} errs by {errors[name]:.1e}" for name, most in TOLERANCE.items() if not errors[name] <= most]
    return found


def _accuracy() -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "draftwood_benchmarks.kernels.accuracy"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        raise BenchmarkError(f"the interpreted kernels failed: {done.stderr.strip().splitlines()[-1]}")
    errors: dict[str, float] = json.loads(done.stdout)
    return errors


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Kernels of the cuda runner", title_justify="left")
    for heading in ("kernel", "variant", "arch"):
        table.add_column(heading, overflow="fold")
    for heading in ("cubin bytes", "shared bytes", "registers", "spills", "max error"):
        table.add_column(heading, justify="right", overflow="fold")
    for row in rows:
        error = "" if row["max_error"] is None else f"{row['max_error']:.1e}"
        figures = (str(row[name]) for name in ("cubin_bytes", "shared_bytes", "registers", "spills"))
        table.add_row(row["kernel"], row["variant"], row["arch"], *figures, error)
    return table


def _draw(rows: list[dict[str, Any]], axes: Any) -> None:
    of_attention = [row for row in rows if row["kernel"] == "attention_parts"]
    axes.barh(
        [f"{row['variant']} {row['arch']}" for row in of_attention],
        [row["shared_bytes"] / 1024 for row in of_attention],
    )
    axes.tick_params(axis="y", labelsize=4)
    axes.set_xlabel("shared memory of a part of attention, KiB")
