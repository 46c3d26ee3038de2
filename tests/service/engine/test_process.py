"""The service and its engine are two processes: how one ends when the other is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftwood_client import NO_RETRY, Client, UnavailableError


@contextmanager
def service(folder: Path, *more: str) -> Iterator[tuple[psutil.Process, str]]:
    """`draftwood serve` with the bundled model, and its address."""
    ready = folder / "address"
    flags = ["--port", "0", "--ready-file", str(ready), "--threads", "1", "--log-level", "error", *more]
    process = subprocess.Popen([sys.executable, "-m", "draftwood_service", *flags])
    try:
        wait(ready.exists)
        yield psutil.Process(process.pid), ready.read_text().strip()
    finally:
        process.kill()
        process.wait()


def wait(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def engine_of(process: psutil.Process) -> psutil.Process:
    [engine] = process.children()
    return engine


def serves(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def test_a_killed_engine_is_started_anew(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cached = service(tmp_path, "--model-cache-folder", str(cache))
    with cached as (process, address), Client(address, retry=NO_RETRY) as client:
        before = client.generate([5], max_tokens=8, timeout=60).token_ids
        killed = engine_of(process)
        with client.stream([5], max_tokens=1500, ignore_eos=True, timeout=60) as stream:
            next(iter(stream))
            killed.send_signal(signal.SIGKILL)
            with pytest.raises(UnavailableError, match="engine"):
                list(stream)
        assert not serves(address)
        with pytest.raises(UnavailableError, match="engine") as caught:
            client.generate([5], max_tokens=4, timeout=5)
        assert caught.value.retry_after is not None
        wait(lambda: serves(address))
        assert engine_of(process).pid != killed.pid
        assert client.generate([5], max_tokens=8, timeout=60).token_ids == before
    assert len([*cache.iterdir()]) == 1  # the second engine found the model of the first


def test_a_killed_engine_that_is_not_restarted_ends_its_service(tmp_path: Path) -> None:
    with service(tmp_path, "--engine-restarts", "0") as (process, address), Client(address, retry=NO_RETRY) as client:
        assert serves(address)
        with client.stream([5], max_tokens=1500, ignore_eos=True, timeout=60) as stream:
            next(iter(stream))
            engine_of(process).kill()
            with pytest.raises(UnavailableError, match="engine"):
                list(stream)
        assert process.wait(20) == 1  # who runs the service starts it anew
        with pytest.raises(UnavailableError):
            client.generate([5], max_tokens=4, timeout=5)
