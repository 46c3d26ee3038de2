"""An engine that dies, a drain, a rolling restart: on every engine."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from draftwood_benchmarks.harness.servers import ServerError
from draftwood_client import Client, UnavailableError
from tests.engines.servers import ENGINES, Served, served_by, started_by, until

LONG: Any = {"max_tokens": 200, "ignore_eos": True, "drafting": False}


@pytest.fixture(scope="module", params=ENGINES)
def own(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server that these tests may damage; the last one kills it."""
    with suppress(ServerError), served_by(request.param, "--engine-restarts", "5", context=2048) as server:
        yield server


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("*") if path.name.startswith(("psm_", "sem."))}


def engine_processes(served: Served) -> list[psutil.Process]:
    """The process of the engine, and those that it started: not the ones that try grammars, nor the store."""
    found = []
    for process in served.children():
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if not any(other in command for other in ("grammar_trial", "valkey", "resource_tracker")):
            found.append(process)
    return found


def ended(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


def until_ended(*processes: psutil.Process) -> None:
    until(lambda: all(map(ended, processes)))


def serves_again(client: Client, seconds: float) -> None:
    def answers() -> bool:
        with suppress(UnavailableError):
            return bool(client.generate("x", max_tokens=3).token_ids)
        return False

    until(answers, seconds)


@pytest.mark.parametrize("which", ["first", "last"])
def test_a_killed_process_of_the_engine_costs_its_own_streams_alone(own: Served, which: str) -> None:
    """The host of the engine, and where it has others, the one that was started last."""
    with Client(own.target, timeout=100) as client:
        client.generate("What is learned?", max_tokens=30, ignore_eos=True, tenant="kept")
        processes = sorted(engine_processes(own), key=lambda one: one.create_time())
        victim = processes[0 if which == "first" else -1]
        with client.stream("A long story:", **{**LONG, "max_tokens": 1900}) as stream:
            next(stream)
            victim.send_signal(signal.SIGKILL)
            with pytest.raises(UnavailableError):
                list(stream)
        serves_again(client, 200)
        until_ended(*processes)  # none is left of the engine before
        until(lambda: own.load().engine_restarts >= 1)


def test_a_drain_lets_running_requests_end(own: Served) -> None:
    before = shared_memory()
    with served_by(own.engine) as served, Client(served.target, timeout=100) as client:
        processes = [psutil.Process(served.pid), *served.children()]
        with client.stream("A long story:", **LONG) as stream:
            next(stream)
            os.kill(served.pid, signal.SIGTERM)
            assert stream.completion().usage.completion_tokens == 200
        until_ended(*processes)
    until(lambda: shared_memory() <= before)


def test_a_service_that_is_killed_leaves_no_process(own: Served) -> None:
    """To be run last: the server is gone."""
    processes = [child for child in own.children() if "valkey" not in child.name()]
    assert engine_processes(own)
    os.kill(own.pid, signal.SIGKILL)
    until_ended(*processes)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_service_that_ends_while_its_engine_loads_leaves_no_process(number: signal.Signals, engine: str) -> None:
    loading = 4 if engine == "vllm" else 1  # the engine's process, its store, vLLM's core, and what tracks resources
    python, environment, flags = started_by(engine)
    command = [python, "-m", "draftwood_service", "--port", "0", *flags]
    with (
        subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.DEVNULL) as started,
        ExitStack() as end,
    ):
        end.callback(started.kill)
        service = psutil.Process(started.pid)
        until(lambda: len(service.children(recursive=True)) >= loading, 100)
        processes = service.children(recursive=True)
        service.send_signal(number)
        until_ended(service, *processes)
