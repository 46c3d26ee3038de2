"""Threads follow the CPU quota of the container, not the cores of the machine; and the default size of KV memory."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftwood_model_runner.engine_config import EngineConfig
from draftwood_model_runner.execution import allocate
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
    made = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert made.stdout.split() == ["1", "1"], made.stderr


def test_a_smaller_number_that_is_set_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "usable_cpus", lambda: 16)
    load_model(runner="torch")
    assert torch.get_num_threads() == 1


class FakeFactory:
    """Has memory for whatever is asked for."""

    name, exact, window, kv_bytes_per_token = "fake", False, None, 1000

    def default_kv_tokens(self, context: int, sequences: int) -> int:
        return context * sequences

    def runner(self, kv_tokens: int, threads: int | None = None, sequences: int | None = None) -> Any:
        return SimpleNamespace(pages=kv_tokens // 16, page_size=16)


def model_of(max_context: int, device: str = "cpu", weights: str = "bfloat16") -> Any:
    options = {"parameters": 500_000_000, "factory": FakeFactory(), "drafters": {}}
    return SimpleNamespace(max_context=max_context, device=device, weights=weights, **options)


@pytest.mark.parametrize(
    ("max_context", "device", "max_running", "contexts"),
    [
        pytest.param(1000, "cpu", 8, 8, id="short contexts, all whole"),
        pytest.param(8000, "cpu", 8, 5, id="eight of 4096 tokens"),
        pytest.param(32_000, "cpu", 8, 2, id="rounded up to whole contexts"),
        pytest.param(32_000, "cpu", 1, 1, id="one full context at least"),
        pytest.param(131_072, "cpu", 8, 1, id="one very long context"),
        pytest.param(32_000, "cuda:0", 8, 8, id="all of them on a GPU"),
    ],
)
def test_the_default_is_a_usual_context_for_each_running_request(
    max_context: int, device: str, max_running: int, contexts: int
) -> None:
    config = EngineConfig(max_running=max_running, max_draft_nodes=48)
    runner, _, running = allocate(model_of(max_context, device), config)
    assert runner.pages * runner.page_size == contexts * (max_context + 48) // 16 * 16
    assert running == max_running


@pytest.mark.parametrize(
    ("weights", "told"), [("bfloat16", ", 1.00 GB"), ("float32", ", 2.00 GB"), ("int4", ", 0.25 GB"), ("torchao", "")]
)
def test_the_log_says_what_the_model_takes(weights: str, told: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    allocate(model_of(4000, weights=weights), EngineConfig(kv_cache_tokens=160_000))
    assert f"memory: 500 million weights ({weights}){told}; KV cache of 160000 tokens, 0.16 GB" in caplog.text
