"""`draftwood bench kernels`: the kernels of the cuda runner, compiled for GPUs.

Needs no GPU: Triton brings the compiler. `make test-gpu-sim` interprets them, and compares with float64.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwood_benchmarks.harness.report import BenchmarkError, OutputOptions, console, progress, table
from draftwood_client.cli.options import command

if TYPE_CHECKING:
    from draftwood_benchmarks.kernels.specialisations import Variant
    from draftwood_benchmarks.kernels.state_specialisations import StateVariant

ARCHITECTURES = (80, 89, 90, 100, 120)
SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Shared memory that a program may have, by compute capability, as the CUDA C++ Programming Guide lists it."""
MOST_SPILLS = 64
"""Bytes a thread, of which a few in the outermost loop cost nothing that can be measured. Not tuned."""


@command
def kernels(
    output: OutputOptions,
    arch: Annotated[
        list[int] | None, typer.Option(min=70, help="Compute capability to compile for; may be given several times.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Compilers that run side by side.")] = os.cpu_count() or 1,
) -> None:
    """Compiles every kernel of the cuda runner to machine code for GPUs (compute capability 8.0, 8.9, 9.0, 10.0 and
    12.0, all head sizes and states of recurrent layers). Fails if a kernel spills registers, or needs more shared
    memory than a GPU has.
    """
    from draftwood_benchmarks.kernels.specialisations import VARIANTS
    from draftwood_benchmarks.kernels.state_specialisations import STATE_VARIANTS

    out = console()
    output.check()
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise BenchmarkError("kernels cannot be compiled with TRITON_INTERPRET=1 in the environment")
    chosen: list[Variant | StateVariant] = [*VARIANTS, *STATE_VARIANTS]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        pending = [pool.submit(compiled, one, capability) for one in chosen for capability in arch or ARCHITECTURES]
        for done in progress(pending, "variants of kernels", out):
            rows += done.result()
    rows.sort(key=lambda row: (row["kernel"], row["variant"], row["arch"]))
    columns = {"kernel": "{kernel}", "variant": "{variant}", "arch": "{arch}"}
    columns |= {"shared bytes": "{shared_bytes}", "registers": "{registers}", "spills": "{spills}"}
    out.print(table("Kernels of the cuda runner", rows, columns, texts=3))
    output.write(rows)
    if problems := defects(rows):
        raise BenchmarkError("; ".join(problems))


def compiled(variant: Variant | StateVariant, capability: int) -> list[dict[str, Any]]:
    """The kernels of a variant; those that depend on nothing of it only once, with the smallest heads."""
    from draftwood_benchmarks.kernels.compiling import compile_launch, launches_of
    from draftwood_benchmarks.kernels.specialisations import Variant

    rows = []
    once = isinstance(variant, Variant) and variant != Variant(variant.head_size)
    for launch in launches_of(variant, capability):
        name = launch.kernel.__name__
        if once and name not in _OF_EVERY_VARIANT:
            continue
        figures = compile_launch(launch, capability)
        rows.append({"kernel": name, "variant": str(variant), "arch": f"sm_{capability}", **figures._asdict()})
    return rows


_OF_EVERY_VARIANT = ("attention_parts", "merge_parts")


def defects(rows: list[dict[str, Any]]) -> list[str]:
    """What is wrong with the kernels, a sentence each."""
    found = []
    for row in rows:
        name = f"{row['kernel']} ({row['variant']}, {row['arch']})"
        if row["spills"] > MOST_SPILLS:
            found.append(f"{name} spills {row['spills']} bytes a thread")
        most = SHARED_BYTES.get(int(row["arch"].removeprefix("sm_")), min(SHARED_BYTES.values()))
        if row["shared_bytes"] > most:
            found.append(f"{name} needs {row['shared_bytes']} bytes of shared memory, there are {most}")
    return found
