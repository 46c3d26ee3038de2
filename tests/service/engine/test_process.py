"""The service and its engine are two processes: how one ends when the other is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftwood_client import NO_RETRY, Client, UnavailableError
from draftwood_service.engine.host import run_engine
from draftwood_service.engine.link import Died, EngineEnd
from draftwood_service.engine.loaded import LoadedEngine

pytestmark = pytest.mark.timeout(300)
"""A service may take two minutes to start where its compiled functions are not cached and the machine is busy."""


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


@pytest.mark.parametrize("after", ["finished=strategies", "finished=model"])
def test_ctrl_c_while_the_model_loads_ends_the_engine_before_the_service(after: str) -> None:
    command = [sys.executable, "-m", "draftwood_service", "--port", "0", "--threads", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if after in line:
                    break
            [engine] = psutil.Process(process.pid).children()
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
            assert not engine.is_running()
            assert "not used" not in process.stderr.read()
        finally:
            process.kill()


LEAVES_A_STORE = """
from draftwood_service.engine.process import EngineProcess, temporary_store
from draftwood_service.settings import Settings

temporary_store(EngineProcess(Settings())._name).mkdir()
"""


def test_a_temporary_store_that_a_killed_engine_left_goes_with_the_service(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LEAVES_A_STORE], env={**os.environ, "TMPDIR": str(tmp_path)}, check=True)
    assert not [*tmp_path.iterdir()]


SWALLOWS = """
import socket, sys, time
from draftwood_service.engine import main
from draftwood_service.engine.link import ServiceEnded

class Slow:
    def __del__(self):
        time.sleep(1.0)

link = socket.socket(fileno=int(sys.argv[1]))  # closed with its last reference
main._end_with_service(link)
try:
    print("began", flush=True)
    Slow()
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            print("went on")
except ServiceEnded:
    print("ended")
main._leave()
"""


def test_what_loads_does_not_take_the_end_of_the_service_for_an_error_of_its_own() -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", SWALLOWS, str(theirs.fileno())]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pass_fds=[theirs.fileno()]
    ) as process:
        theirs.close()
        assert process.stdout is not None
        assert process.stdout.readline() == "began\n"
        ours.close()
        assert process.communicate(timeout=30) == ("ended\n", "")


def test_what_an_engine_that_loads_died_of_is_sent() -> None:
    def load() -> AbstractContextManager[LoadedEngine]:
        raise EOFError("a file that is cut short")

    ours, theirs = socket.socketpair()
    with ours:
        run_engine(EngineEnd(theirs), load)
        died: object = EngineEnd(ours).receive(wait=None)
    assert isinstance(died, Died)
    assert str(died.error) == "a file that is cut short"


def engine_of(process: psutil.Process) -> psutil.Process:
    [engine] = [child for child in process.children() if "draftwood_service.engine.main" in child.cmdline()]
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
    assert len([one for one in cache.iterdir() if one.is_dir()]) == 1  # the second engine found the model of the first


def test_a_killed_engine_that_is_not_restarted_ends_its_service(tmp_path: Path) -> None:
    with service(tmp_path, "--engine-restarts", "0") as (process, address), Client(address, retry=NO_RETRY) as client:
        assert serves(address)
        killed = engine_of(process)
        with client.stream([5], max_tokens=1500, ignore_eos=True, timeout=60) as stream:
            next(iter(stream))
            killed.kill()
            with pytest.raises(UnavailableError, match="engine"):
                list(stream)
        assert process.wait(20) == 1  # its supervisor restarts it
        with pytest.raises(UnavailableError):
            client.generate([5], max_tokens=4, timeout=5)
