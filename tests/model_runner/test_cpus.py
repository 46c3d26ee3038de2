"""Threads follow the CPU quota of the container, not the cores of the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draftwood_model_runner.loading.model import load_model
from draftwood_model_runner.runners import machine as host
from draftwood_strategies.threads import usable_cpus


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> int:
    """A machine of 64 cores, on all of which the process may run."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    return 64


def files(root: Path, **texts: object) -> Path:
    """A control group; `max`, `cfs_quota_us` and so on, in a folder of version 1 if one is named."""
    folder = root / str(texts.pop("folder", ""))
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"cpu.{name}").write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ({"max": "400000 100000"}, 4),
        ({"max": "250000 100000"}, 2),  # a third thread would be held back half of the time
        ({"max": "50000 100000"}, 1),
        ({"max": "max 100000"}, 64),
        ({"max": "12800000 100000"}, 64),
        ({"max": "nonsense"}, 64),
        ({"max": ""}, 64),
        *(
            ({"folder": folder, "cfs_quota_us": quota, "cfs_period_us": 100_000}, expected)
            for folder in ("cpu", "cpu,cpuacct")
            for quota, expected in ((400_000, 4), (150_000, 1), (-1, 64))
        ),
    ],
)
def test_a_quota(machine: int, tmp_path: Path, texts: dict[str, object], expected: int) -> None:
    assert usable_cpus(files(tmp_path, **texts)) == expected


def test_no_control_group_and_fewer_cores(machine: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert usable_cpus(tmp_path / "absent") == machine
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    assert usable_cpus(files(tmp_path, max="400000 100000")) == 2


_STEP_THREADS = """
import sys
from pathlib import Path
from draftwood_strategies import threads
threads.usable_cpus.__defaults__ = (Path(sys.argv[1]),)
import torch
from draftwood_model_runner.loading.model import load_model
model = load_model(runner=sys.argv[2])
runner = model.factory.runner(256, None)
found = runner._threads if sys.argv[2] == "torch" else model.factory._compiled[0]
print(torch.get_num_threads(), found)
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one thread is all there is")
@pytest.mark.system
@pytest.mark.parametrize("runner", ["torch", "openvino"])
def test_a_model_is_loaded_and_computed_with_as_many_threads_as_the_quota_has(runner: str, tmp_path: Path) -> None:
    """On a machine with more, of which torch would take all."""
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    arguments = [sys.executable, "-c", _STEP_THREADS, str(files(tmp_path, max="150000 100000")), runner]
    made = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert made.stdout.split() == ["1", "1"], made.stderr


def test_a_smaller_number_that_is_set_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        monkeypatch.setattr(host, "usable_cpus", lambda: 16)
        load_model(runner="torch")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
