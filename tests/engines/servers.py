"""Servers of each engine in processes of their own, as a user starts them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from draftwood_benchmarks.harness.servers import server_process
from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL
from tests.memory.servers import free_port
from tests.vllm.engine import ENVIRONMENT, PYTHON, REPOSITORY

ENGINES = ["draftwood", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(600)])]
_FOLDERS = (
    "",
    "clients/python",
    "protos",
    "strategies",
    "memory",
    "tenants",
    "model_runner",
    "service",
    "benchmarks",
    "plugins/vllm",
)
TENANTS = """
tenants:
- {name: tenants/limited, quotas: {concurrency: 1}}
- {name: tenants/fixed, allowDraftOverride: false, drafting: {strategy: trie, maxNodes: 4}}
- {name: tenants/warm-blooded, sampling: {temperature: 0.7}}
- {name: tenants/silent, learning: {scope: LEARNING_SCOPE_NOTHING}}
- {name: tenants/heavy, weight: 3}
"""
"""Of each server, for the tests of tenants."""
CONTEXT, SLOTS = 256, 4


@dataclass(frozen=True)
class Served:
    """A running server.

    Attributes:
        engine: its name.
        target: "host:port".
        pid: of the service.
        metrics_port: where its metrics are.
    """

    engine: str
    target: str
    pid: int
    metrics_port: int

    def children(self) -> list[psutil.Process]:
        """All processes that the service has started."""
        found: list[psutil.Process] = psutil.Process(self.pid).children(recursive=True)
        return found

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's points that have these labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=20) as answer:
            text = answer.read().decode()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        found = re.findall(rf"^{name}(?:{{([^}}]*)}})? (\S+)$", text, re.MULTILINE)
        return sum(float(value) for point, value in found if all(one in point for one in wanted))


@contextmanager
def served_by(
    engine: str,
    *flags: str,
    tenants: str | None = TENANTS,
    model: str = BUNDLED_MODEL,
    context: int = CONTEXT,
    **engine_args: Any,
) -> Iterator[Served]:
    """A server with the bundled model in float32.

    Args:
        flags: further flags of `draftwood serve`.
        tenants: its file of tenants; None for those of its store.
        model: its folder.
        context: in tokens.
        engine_args: of vLLM.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="draftwood-tenants-") as folder:
        files = []
        if tenants is not None:
            Path(folder, "tenants.yaml").write_text(tenants)
            files = ["--tenants-file", str(Path(folder, "tenants.yaml"))]
        python, environment, own = started_by(engine, model, context, **engine_args)
        arguments = [*own, *files, "--metrics-port", str(port), *flags]
        with server_process(*arguments, environment=environment, python=python) as server:
            yield Served(engine, server.target, server.pid, port)


def started_by(
    engine: str, model: str = BUNDLED_MODEL, context: int = CONTEXT, **engine_args: Any
) -> tuple[str, dict[str, str], list[str]]:
    """How a server is started: the interpreter, further variables of its environment, flags of `draftwood serve`."""
    flags = ["--engine", engine, "--model", model, "--dtype", "float32", "--model-cache", "false"]
    flags += ["--max-context", str(context), "--max-running", str(SLOTS), "--kv-cache-tokens", "4096"]
    if engine != "vllm":
        return sys.executable, {"OMP_NUM_THREADS": "1"}, [*flags, "--runner", "torch"]
    paths = os.pathsep.join(str(REPOSITORY / folder) for folder in _FOLDERS)
    own = ["--engine-args", json.dumps({"enforce_eager": True, **engine_args})]
    return str(PYTHON), {**ENVIRONMENT, "PYTHONPATH": paths}, [*flags, *own]


@contextmanager
def starting(engine: str) -> Iterator[psutil.Process]:
    """A service that was just started."""
    python, environment, flags = started_by(engine)
    command = [python, "-m", "draftwood_service", "--port", "0", *flags]
    process = subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.DEVNULL)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.05)
