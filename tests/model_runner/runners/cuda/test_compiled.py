"""All kernels compile for GPUs that need not be there, within their registers and shared memory.

`python -m tests.model_runner.runners.cuda.test_compiled 90` prints what each takes on GPUs of compute capability 9.0:
Triton brings the compiler. The steps of other tests run with a launcher that only notes the launches, so kernels are
compiled as the runner's own code calls them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from draftwood_model_runner.request import SamplingParams
from draftwood_model_runner.runners.base import Following, KVShape
from draftwood_model_runner.runners.cuda.device import LAUNCHER, Launch
from draftwood_model_runner.runners.cuda.following import Followed
from draftwood_model_runner.runners.cuda.forward import StepBuffers, find_top
from draftwood_model_runner.runners.cuda.layers import FusedNorm, exact_linear, fused_rotation, fused_silu
from draftwood_model_runner.runners.cuda.memory import PAGE_SIZE, KVPages
from draftwood_model_runner.runners.cuda.sampling import sample_and_accept
from draftwood_model_runner.runners.cuda.tiling import Division, divide
from draftwood_model_runner.sampling.metadata import (
    NO_MASK,
    Adjustments,
    SamplingMetadata,
    SequenceSampling,
    TokenMasks,
)
from draftwood_strategies.device.trie import DeviceDrafts
from tests.model_runner.runners.cuda.reference import CPU, attended, random_batch
from tests.model_runner.runners.cuda.state_reference import RowSizes, Shape, StateCase

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_TYPES = {_FP32: "fp32", _FP16: "fp16", _BF16: "bf16", torch.int32: "i32", torch.int64: "i64", torch.float64: "fp64"}
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
_DIVISIBLE = 16
_HEAD_SIZES = (64, 80, 96, 128, 192, 256)
_KV_HEADS, _GROUP, _VOCAB, _HIDDEN = 8, 4, 32_000, 4096
_ATTENTION: tuple[tuple[int, torch.dtype, dict[str, Any]], ...] = (
    *((size, _BF16, {"many_rows": many}) for size in _HEAD_SIZES for many in (False, True)),
    *((size, _BF16, {"exact": True}) for size in _HEAD_SIZES),
    (128, _FP16, {"many_rows": True}),
    (128, _FP32, {}),
    (128, _BF16, {"many_rows": True, "window": 4096}),
    (64, _BF16, {"many_rows": True, "window": 4096, "sinks": torch.zeros(_KV_HEADS * _GROUP, dtype=_BF16)}),
    (256, _BF16, {"many_rows": True, "window": 4096, "softcap": 50.0}),
    (256, _FP32, {}),
)
"""Head sizes, dtypes and further arguments of `attended`: the most usual size also in other dtypes, and what some
families add."""
_STATES = (
    ("delta_rule", 128, 128, _BF16),  # Qwen 3 Next and 3.5
    ("delta_rule", 128, 128, _FP16),
    ("delta_rule", 128, 128, _FP32),
    ("delta_rule", 96, 192, _BF16),  # Olmo Hybrid
    ("state_space", 64, 64, _BF16),  # Zamba 2
    ("state_space", 128, 64, _BF16),  # Bamba, Granite 4, Nemotron H
    ("state_space", 128, 128, _BF16),  # Falcon H1
    ("state_space", 256, 64, _BF16),
    ("state_space", 256, 64, _FP32),
    ("state_space", 256, 128, _BF16),
)
"""Recurrences, rows and columns of the state of a head, dtypes."""


def steps(capability: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Parts of steps by what they are compiled for, which launch as on a GPU of this compute capability."""
    random = np.random.default_rng(0)
    batch, pages = random_batch(random, [(20, 1, 20)], 0.6)
    for size, dtype, options in _ATTENTION:
        shape = KVShape(_KV_HEADS, size, size)
        run = partial(attended, batch, pages, shape, _GROUP, dtype, random, capability=capability, **options)
        yield f"{size} {dtype} {', '.join(options)}", run
    for size in _HEAD_SIZES:
        yield f"{size}", partial(_whole_step, size)
    for recurrence, rows, columns, dtype in _STATES:
        case = StateCase(random, [RowSizes(2, 1, 3)], Shape(32, 16, rows, columns), dtype, beside=16)
        yield f"state {rows} x {columns} {dtype}", getattr(case, recurrence)
        yield f"{dtype}", partial(case.convolution, 2 * 16 * rows + 32 * columns)


def _whole_step(head_size: int) -> None:
    """What a step with a draft and a sampled sequence launches beside attention."""
    batch, pages = random_batch(np.random.default_rng(0), [(20, 1, 20)], 0.6)
    shape, zeros = KVShape(_KV_HEADS, head_size, head_size), np.zeros(1, np.int32)
    tiles, kv = divide(batch, Division(16, 2)), KVPages((shape,), _BF16, CPU, pages * PAGE_SIZE)
    words, parts = tiles.ancestor_bitmask.shape[1], tiles.parts.shape[0]
    space = StepBuffers((shape,), batch.size, words, parts, 64, pages, CPU, 0)
    masks = TokenMasks(np.full(batch.size, NO_MASK, np.int32), np.zeros((1, _VOCAB // 32), np.int32))
    adjustments = Adjustments(zeros, zeros, zeros.astype(np.float32), zeros)
    params = SamplingParams(1.0, 5, 0.9, 0.1, 1.1, 0.1, 0.1, seed=1)
    sampling = SamplingMetadata.of([SequenceSampling(params, 9, adjustments, masks)])
    space.arrays.fill(batch, tiles, batch.size, sampling)
    hidden = torch.zeros(1, batch.size, _HIDDEN, dtype=_BF16)
    exact_linear(torch.empty(_HIDDEN, _HIDDEN, dtype=_BF16), hidden[0, 0])(hidden)
    query = torch.zeros(1, _KV_HEADS * _GROUP, batch.size, head_size, dtype=_BF16)
    for add_one in (False, True):
        norm = FusedNorm(hidden[0, 0], 1e-6, add_one)
        norm(hidden)
        norm.of_sum(hidden, hidden)
        FusedNorm(query[0, 0, 0], 1e-6, add_one)(query.transpose(1, 2))
    fused_silu(*hidden.chunk(2, -1))
    fused_rotation(query, query[:, :_KV_HEADS], query[0, :1], query[0, :1])
    logits = torch.zeros(batch.size, _VOCAB, dtype=_BF16)
    find_top(logits, space)
    written = sample_and_accept(logits, space.top, space.arrays, sampling, kv)
    drafts = torch.zeros((1, 64), dtype=torch.int32)
    trees = DeviceDrafts(drafts, drafts, drafts, torch.zeros(1, dtype=torch.int32))
    Followed(written(), Following(zeros, zeros, None)).fill(space.arrays, batch, trees)


def compiled(capability: int) -> Iterator[dict[str, Any]]:
    """The kernels of all steps, each specialisation once.

    Raises:
        Exception: whatever Triton raises for a kernel that it cannot compile.
    """
    seen = set()
    for variant, run in steps(capability):
        launches: list[Launch] = []
        token = LAUNCHER.set(launches.append)
        try:
            run()
        finally:
            LAUNCHER.reset(token)
        for launch in launches:
            types, constants, divisible = signature(launch)
            options = {name: launch.constants[name] for name in _OPTIONS if name in launch.constants}
            if (key := repr((launch.kernel.__name__, types, constants, divisible, options))) in seen:
                continue
            seen.add(key)
            yield {"variant": variant, **compiled_launch(launch, capability)}


def compiled_launch(launch: Launch, capability: int) -> dict[str, Any]:
    """What its kernel takes on GPUs of this compute capability."""
    options = {name: launch.constants[name] for name in _OPTIONS if name in launch.constants}
    source = ASTSource(launch.kernel, *signature(launch))
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {
        "kernel": launch.kernel.__name__,
        "shared_bytes": kernel.metadata.shared,
        **_resources(kernel.asm["cubin"]),
    }


def signature(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list[list[object]]]]:
    """Types of all arguments, values of constants, and which arguments are divisible by 16: what Triton's own
    specialisation of the call would be."""
    types: dict[str, str] = {}
    constants = {name: value for name, value in launch.constants.items() if name not in _OPTIONS}
    divisible: dict[tuple[int], list[list[object]]] = {}
    for place, name in enumerate(launch.kernel.arg_names):
        if name in constants:
            types[name] = "constexpr"
            continue
        value = launch.arguments[place]
        specialised = not launch.kernel.params[place].do_not_specialize
        if isinstance(value, torch.Tensor):
            types[name] = "*" + _TYPES[value.dtype]
        elif isinstance(value, float):
            types[name] = "fp32"
        elif value == 1 and specialised:
            types[name], constants[name] = "constexpr", 1
        else:
            types[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if specialised and isinstance(number, int) and number % _DIVISIBLE == 0 and types[name] != "constexpr":
            divisible[(place,)] = [["tt.divisibility", _DIVISIBLE]]
    return types, constants, divisible


def _resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and its bytes of local memory where they did not suffice, as the tool of CUDA that Triton
    brings reads them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", path]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    resources = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    assert resources is not None, usage
    return {"cubin_bytes": len(cubin), "registers": int(resources[1]), "spills": int(resources[2]) + int(resources[3])}


SHARED_BYTES = {"80": 163 * 1024, "89": 99 * 1024, "90": 227 * 1024, "100": 227 * 1024, "120": 99 * 1024}
"""Shared memory that a program may have, by compute capability, as the CUDA C++ Programming Guide lists it."""
MOST_SPILLS = 64
"""Bytes a thread, of which a few in the outermost loop cost nothing that can be measured. Not tuned."""
KERNELS = {
    "accept_paths", "adjust_scores", "attention_parts", "continue_rows", "convolve", "linear", "merge_parts", "move_kv",
    "recurrence", "rms_norm", "rotate", "sample_tokens", "silu_product", "top_of_blocks", "top_of_rows", "write_kv",
}  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "capability", ["80", "90", "100", *(pytest.param(each, marks=pytest.mark.slow) for each in ("89", "120"))]
)
def test_every_kernel_compiles_without_spilling(capability: str) -> None:
    """In a process of its own: in this one Triton interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.model_runner.runners.cuda.test_compiled", capability]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row["kernel"] for row in rows} >= KERNELS
    assert all(row["cubin_bytes"] > 1000 for row in rows)
    assert [row for row in rows if row["spills"] > MOST_SPILLS] == []
    assert [row for row in rows if row["shared_bytes"] > SHARED_BYTES[capability]] == []


if __name__ == "__main__":
    print(json.dumps([*compiled(int(sys.argv[1]))]))
