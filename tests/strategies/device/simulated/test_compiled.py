"""The kernels of drafts compile for GPUs that need not be there, within their registers and shared memory.

`python -m tests.strategies.device.simulated.test_compiled 90` prints what each takes on GPUs of compute capability 9.0.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from draftwood_model_runner.runners.cuda import device
from draftwood_model_runner.runners.model_calls import setting
from draftwood_strategies.device.arena import DeviceSizes
from draftwood_strategies.device.calls import VerifiedTrees
from draftwood_strategies.device.choice import DeviceChoice
from draftwood_strategies.device.launching import LAUNCHER, Launch
from draftwood_strategies.device.mixture import DeviceMixture
from draftwood_strategies.device.trie import DeviceDrafts, DeviceTrie
from tests.model_runner.runners.cuda import test_compiled as runner

_ROWS = 256
_SIZES = DeviceSizes(rows=_ROWS, row_tokens=1024, tenants=2, tenant_tokens=1 << 16, contexts=1 << 17)


def launches() -> list[Launch]:
    """Those of a trie and a mixture with many rows that write texts and memories. Nothing is read or written."""
    found: list[Launch] = []
    with setting(LAUNCHER, found.append):
        trie = DeviceTrie(_SIZES, torch.device("cpu"))
        numbers, table = torch.zeros(_ROWS, dtype=torch.int32), torch.zeros(_ROWS, 64, dtype=torch.int32)
        trie.append_prompts(numbers, numbers, torch.zeros(_ROWS + 1, dtype=torch.int32))
        trie.begin_outputs(numbers)
        trie.propose_chains(numbers, numbers, table, table.float(), numbers)
        mixture, offsets = DeviceMixture(trie), torch.zeros(_ROWS + 1, dtype=torch.int32)
        mixture.propose(numbers, numbers, DeviceDrafts(table, table, table.float(), numbers))
        trees = VerifiedTrees(numbers, numbers, table[:, :9].contiguous(), offsets)
        mixture.learn(numbers, table[:, :33].contiguous(), numbers, numbers, trees)
        trie.learn(numbers, table[:, :33].contiguous(), numbers)
        trie.import_runs("tenant", [np.zeros(9, np.int32)] * 20)
        for longest, probabilistic in ((5, False), (16, True)):
            choice = DeviceChoice(_ROWS, 17, longest, torch.device("cpu"), probabilistic)
            drafts = torch.zeros(_ROWS, longest, dtype=torch.int64)
            choice.grade(numbers, numbers, table, numbers)
            scores = drafts.float()
            choice.choose(numbers, numbers, numbers, numbers.float(), drafts, drafts, scores, numbers, longest)
    return found


def compiled(capability: int) -> Iterator[dict[str, Any]]:
    for launch in launches():
        kernel = launch.compiled()
        called = device.Launch(kernel, launch.grid, launch.arguments, launch.constants)
        variant = {name: launch.constants[name] for name in ("KIND", "CHAINS_ONLY") if name in launch.constants}
        yield {"variant": variant, **runner.compiled_launch(called, capability)}


_OLDER = 192
"""Bytes that a draft may spill for 8.0 and 8.9, where it does 160."""
KERNELS = {
    *("append", "begin_outputs", "draft", "learn", "update_weights", "mix", "observe", "apply"),
    *("grade", "choose"),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "capability", ["90", *(pytest.param(each, marks=pytest.mark.slow) for each in ("80", "89", "100", "120"))]
)
def test_every_kernel_compiles_without_spilling(capability: str) -> None:
    """In a process of its own: in this one Triton interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", __name__, capability]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row["kernel"] for row in rows} >= KERNELS
    assert [row for row in rows if row["spills"] > (runner.MOST_SPILLS if int(capability) >= 90 else _OLDER)] == []
    assert [row for row in rows if row["shared_bytes"] > runner.SHARED_BYTES[capability]] == []


if __name__ == "__main__":
    print(json.dumps([*compiled(int(sys.argv[1]))]))
