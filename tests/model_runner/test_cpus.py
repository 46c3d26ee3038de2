"""Threads follow the CPU quota of the container, not the cores of the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draftwood_model_runner.loading.model import load_model
from draftwood_model_runner.runners.capacity import threads
from draftwood_model_runner.sampling.host.cpus import usable_cpus


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> int:
    """A machine of 64 cores, on all of which the process may run."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    return 64


def v2(root: Path, text: str) -> Path:
    (root / "cpu.max").write_text(text)
    return root


def v1(root: Path, quota: int, period: int = 100_000, folder: str = "cpu") -> Path:
    (root / folder).mkdir()
    (root / folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (root / folder / "cpu.cfs_period_us").write_text(f"{period}\n")
    return root


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("400000 100000\n", 4),
        ("250000 100000\n", 2),  # a third thread would be held back half of the time
        ("50000 100000\n", 1),
        ("max 100000\n", 64),
        ("12800000 100000\n", 64),
        ("nonsense", 64),
        ("", 64),
    ],
)
def test_a_quota_of_version_2(machine: int, tmp_path: Path, text: str, expected: int) -> None:
    assert usable_cpus(v2(tmp_path, text)) == expected


@pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize(("quota", "expected"), [(400_000, 4), (150_000, 1), (-1, 64)])
def test_a_quota_of_version_1(machine: int, tmp_path: Path, folder: str, quota: int, expected: int) -> None:
    assert usable_cpus(v1(tmp_path, quota, folder=folder)) == expected


def test_no_control_group_and_fewer_cores(machine: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert usable_cpus(tmp_path / "absent") == machine
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    assert usable_cpus(v2(tmp_path, "400000 100000")) == 2


_STEP_THREADS = """
import sys
from pathlib import Path
from draftwood_model_runner.sampling.host import cpus
cpus.usable_cpus.__defaults__ = (Path(sys.argv[1]),)
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
    arguments = [sys.executable, "-c", _STEP_THREADS, str(v2(tmp_path, "150000 100000")), runner]
    made = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert made.stdout.split() == ["1", "1"], made.stderr


def test_a_smaller_number_that_is_set_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        monkeypatch.setattr(threads, "usable_cpus", lambda: 16)
        load_model(runner="torch")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
