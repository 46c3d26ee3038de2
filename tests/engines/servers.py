"""Servers of each engine in processes of their own, as a user starts them."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from draftwood.admin.v1.status_pb2 import LoadStatus
from draftwood_benchmarks.harness.servers import server_process
from draftwood_client import AdminClient
from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL
from tests.vllm.engine import ENVIRONMENT, PYTHON, REPOSITORY

_STARTS = pytest.mark.timeout(600)
ENGINES = [pytest.param("draftwood", marks=_STARTS), pytest.param("vllm", marks=[pytest.mark.vllm, _STARTS])]
_FOLDERS = "protos", "clients/python", "strategies", "memory", "tenants", "model_runner", "service", "plugins/vllm"
PACKAGES = os.pathsep.join(str(REPOSITORY / folder) for folder in _FOLDERS)
"""PYTHONPATH of a service in the environment of vLLM."""
TENANTS = """
tenants:
- {name: tenants/limited, quotas: {concurrency: 1}}
- {name: tenants/fixed, allowDraftOverride: false, drafting: {strategy: trie, maxNodes: 4}}
- {name: tenants/warm-blooded, sampling: {temperature: 0.7}}
- {name: tenants/silent, learning: {scope: LEARNING_SCOPE_NOTHING}}
"""
"""Of each server, for the tests of tenants."""
CONTEXT, SLOTS = 256, 4


@dataclass(frozen=True)
class Served:
    """A running server at `target`, "host:port"."""

    engine: str
    target: str
    pid: int

    def children(self) -> list[psutil.Process]:
        """All processes that the service has started."""
        found: list[psutil.Process] = psutil.Process(self.pid).children(recursive=True)
        return found

    def load(self) -> LoadStatus:
        with AdminClient(self.target) as admin:
            return admin.status(timeout=20).load

    def idle(self) -> bool:
        load = self.load()
        return load.running + load.waiting == 0


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
        engine_args: of vLLM.
    """
    with tempfile.TemporaryDirectory(prefix="draftwood-tenants-") as folder:
        if tenants is not None:
            Path(folder, "tenants.yaml").write_text(tenants)
            flags = ("--tenants-file", str(Path(folder, "tenants.yaml")), *flags)
        python, environment, own = started_by(engine, model, context, **engine_args)
        with server_process(*own, *flags, environment=environment, python=python) as server:
            yield Served(engine, server.target, server.pid)


def started_by(
    engine: str, model: str = BUNDLED_MODEL, context: int = CONTEXT, **engine_args: Any
) -> tuple[str, dict[str, str], list[str]]:
    """How a server is started: the interpreter, further variables of its environment, flags of `draftwood serve`."""
    flags = ["--engine", engine, "--model", model, "--dtype", "float32", "--model-cache", "false"]
    flags += ["--max-context", str(context), "--max-running", str(SLOTS), "--kv-cache-tokens", "4096"]
    if engine != "vllm":
        return sys.executable, {"OMP_NUM_THREADS": "1"}, [*flags, "--runner", "torch"]
    own = ["--engine-args", json.dumps({"enforce_eager": True, **engine_args})]
    return str(PYTHON), {**ENVIRONMENT, "PYTHONPATH": PACKAGES}, [*flags, *own]


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.05)
