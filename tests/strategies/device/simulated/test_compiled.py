"""The trie's kernels compile for GPUs that need not be there, within their registers and shared memory.

`python -m tests.strategies.device.simulated.test_compiled 90` prints what each takes on GPUs of compute capability 9.0.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from draftwood_model_runner.runners.cuda import device
from draftwood_model_runner.runners.model_calls import setting
from draftwood_strategies.device.calls import append, draft, learn
from draftwood_strategies.device.arena import MEMORY, RECORDED, TEXT, DeviceSizes, Layout
from draftwood_strategies.device.launching import LAUNCHER, Launch
from tests.model_runner.runners.cuda import test_compiled as runner

_SIZES = DeviceSizes(rows=256, row_tokens=8192, tenants=64, tenant_tokens=1 << 20)


def launches() -> list[Launch]:
    """Of all kernels, for the largest batches. Nothing is read or written."""
    found: list[Launch] = []
    layout, numbers = Layout(_SIZES), torch.zeros(256, dtype=torch.int32)
    with setting(LAUNCHER, found.append):
        for kind in (TEXT, MEMORY, RECORDED):
            append(numbers, layout, kind, numbers, numbers, numbers, numbers)
        several, scores = numbers.view(4, 64), numbers.view(4, 64).float()
        for chains in (False, True):
            draft(numbers, layout, numbers, numbers, 32, (several, several, scores, numbers), chains)
        learn(numbers, layout, numbers[:4], several, numbers, 32)
    return found


def compiled(capability: int) -> Iterator[dict[str, Any]]:
    for launch in launches():
        kernel = launch.compiled()
        called = device.Launch(kernel, launch.grid, launch.arguments, launch.constants)
        variant = {name: launch.constants[name] for name in ("KIND", "CHAINS_ONLY") if name in launch.constants}
        yield {"variant": variant, **runner.compiled_launch(called, capability)}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "capability", ["80", "90", "120", *(pytest.param(each, marks=pytest.mark.slow) for each in ("89", "100"))]
)
def test_every_kernel_compiles_without_spilling(capability: str) -> None:
    """In a process of its own: in this one Triton interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", __name__, capability]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row["kernel"] for row in rows} == {"append", "draft", "learn", "settle"}
    assert [row for row in rows if row["spills"] > runner.MOST_SPILLS] == []
    assert [row for row in rows if row["shared_bytes"] > runner.SHARED_BYTES[capability]] == []


if __name__ == "__main__":
    print(json.dumps([*compiled(int(sys.argv[1]))]))
