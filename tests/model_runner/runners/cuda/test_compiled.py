"""All kernels compile for GPUs, within their registers and shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SHARED_BYTES = {"80": 163 * 1024, "89": 99 * 1024, "90": 227 * 1024, "100": 227 * 1024, "120": 99 * 1024}
"""Shared memory that a program may have, by compute capability, as the CUDA C++ Programming Guide lists it."""
MOST_SPILLS = 64
"""Bytes a thread, of which a few in the outermost loop cost nothing that can be measured. Not tuned."""
KERNELS = {
    "accept_paths", "adjust_scores", "attention_parts", "sample_tokens", "convolve", "linear", "merge_parts", "move_kv",
    "recurrence", "rms_norm", "rotate", "silu_product", "top_of_blocks", "top_of_rows", "write_kv",
}  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "capability", ["80", "90", "100", *(pytest.param(each, marks=pytest.mark.slow) for each in ("89", "120"))]
)
def test_every_kernel_compiles_without_spilling(capability: str) -> None:
    """In a process of its own: in this one Triton interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.model_runner.runners.cuda.compiled", capability]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row["kernel"] for row in rows} >= KERNELS
    assert all(row["cubin_bytes"] > 1000 for row in rows)
    assert [row for row in rows if row["spills"] > MOST_SPILLS] == []
    assert [row for row in rows if row["shared_bytes"] > SHARED_BYTES[capability]] == []
