"""`draftwood serve` as a process: its messages when it cannot serve, how signals end it, and a user that a cluster
chose: one without a name, of group 0, that may write to three folders alone.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from ctypes.util import find_library
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftwood.v1 import generation_pb2 as pb
from draftwood.v1 import generation_pb2_grpc as pb_grpc
from draftwood_benchmarks.harness.servers import wait_for_address
from draftwood_client import Client
from draftwood_model_runner.errors import InvalidValueError
from draftwood_service.starting import require_writable

# Serves the fake model, for what is tested here is the process around it.
SERVE_FAKE = """
import sys
from draftwood_service import commands
from tests.service.fakes import FakeEngine, FakeModel, started_bridge
engine = FakeEngine()
engine.step_seconds = 0.01
async def start_engine(settings):
    return await started_bridge(settings, FakeModel(), lambda: engine), FakeModel()
commands._start_engine = start_engine
status = commands.serve(sys.argv[1:])
assert engine.closed and not engine.has_work
sys.exit(status)
"""


WITHOUT_TORCH = """
import asyncio, sys
from draftwood_service import commands
from draftwood_service.serving import ServedModel
from draftwood_service.settings import Settings

async def start():
    bridge, model = await commands._start_engine(Settings(threads=1, model_cache=False))
    assert isinstance(model, ServedModel)
    assert model.tokenizer.encode_chat([{"role": "user", "content": "Hello"}]).size > 1
    await bridge.close()
    import draftwood_service.rpc.server
    assert not {"torch", "openvino"} & sys.modules.keys()

if __name__ == "__main__":
    asyncio.run(start())
"""


OPTIONS_WITHOUT_NUMBA = """
import sys
import draftwood_service.rpc.server
import draftwood_service.serving
from draftwood_strategies import strategy_names
from draftwood_strategies.registry import check_options
assert {"trie", "hybrid", "recycling", "jacobi", "none"} <= {*strategy_names()}
assert check_options("hybrid", {"branch_length": 4.0, "sources": "trie, jacobi"})["branch_length"] == 4
assert not {"torch", "openvino", "numba"} & sys.modules.keys()
"""


def environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("DRAFTWOOD_")}


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "draftwood_service", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(), check=False)


class Process:
    """The fake service in a process of its own."""

    def __init__(self, folder: Path, *args: str) -> None:
        ready = folder / "ready"
        command = [sys.executable, "-c", SERVE_FAKE, "--port", "0", "--ready-file", str(ready), *args]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment())
        while not ready.exists() and self.process.poll() is None:
            time.sleep(0.01)
        self.address = ready.read_text().strip()

    def ends(self) -> tuple[int, str]:
        """Exit status and log."""
        _, log = self.process.communicate(timeout=20)
        return self.process.returncode, log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_with_zero(number: signal.Signals, tmp_path: Path) -> None:
    service = Process(tmp_path, "--log-format", "json")
    with grpc.insecure_channel(service.address) as channel:
        request = pb.GenerateRequest(text="hello", stop=pb.StopOptions(max_tokens=40))
        call = pb_grpc.GenerationServiceStub(channel).GenerateStream(request)
        assert next(call).HasField("started")
        service.process.send_signal(number)
        events = list(call)
    assert events[-1].finished.usage.completion_tokens == 40
    status, log = service.ends()
    assert status == 0
    assert '"address": "' + service.address in log
    assert "Traceback" not in log


def test_a_second_interrupt_exits_at_once(tmp_path: Path) -> None:
    service = Process(tmp_path, "--drain-grace", "60")
    with grpc.insecure_channel(service.address) as channel:
        request = pb.GenerateRequest(text="hello", stop=pb.StopOptions(max_tokens=4000))
        call = pb_grpc.GenerationServiceStub(channel).GenerateStream(request)
        next(call)
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=10)
        service.process.send_signal(signal.SIGINT)
        next(one for one in health if one.status == health_pb2.HealthCheckResponse.NOT_SERVING)
        service.process.send_signal(signal.SIGINT)
        status, _ = service.ends()
    assert status == 130


def test_a_bad_setting_is_one_line_and_status_two() -> None:
    result = run("--port", "many")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == "draftwood serve: --port many: must be an integer\n"


FAILS_EARLY = """
import sys
from draftwood_service import commands
assert commands.serve(sys.argv[1:]) == 1
large = {"torch", "transformers", "grpc", "numba", "numpy"} & sys.modules.keys()
assert not large, large
"""


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--port {taken}", "--port {taken}: address already in use"),
        ("--health-port {taken}", "--health-port {taken}: address already in use"),
        (
            "--store embedded --store-folder {file}/x",
            "--store-folder {file}/x: {file} is a file; give a folder, which is made if it is missing",
        ),
        (
            "--store embedded --store-folder /proc/x",
            "--store-folder /proc/x: cannot be made or used: no such file or directory; give a folder that this user",
        ),
        ("--store-key-file {file}", "--store-key-file: key 1 has no id of 1 to 32 bytes, or no value; give"),
        ("--store rediss://x --store-tls-ca {file}", "--store-tls-ca {file}: has no PEM certificate"),
        (
            "--store rediss://x --store-tls-cert {file} --store-tls-key {file}",
            "--store-tls-cert {file}: is no PEM certificate, or {file} is not its private key",
        ),
        ("--compiled-functions {file}", "--compiled-functions {file}: needs the environment variable NUMBA_CACHE_DIR"),
        ("--ready-file /no/ready", "--ready-file /no/ready: cannot be written: no such file or directory"),
        ("--model {file}", "model '{file}': is not a GGUF file (it begins with"),
        pytest.param(
            "--device cuda",
            "--device: 'cuda' is not allowed; this machine has no GPU driver",
            marks=pytest.mark.skipif(find_library("cuda") is not None, reason="this machine has a driver"),
        ),
    ],
)
def test_what_can_be_checked_at_once_is_one_line_before_anything_large_is_imported(flags: str, problem: str) -> None:
    """`draftwood serve --check` has the same checks, and tests of what each finds."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"taken": taken.getsockname()[1], "file": __file__}
        command = [sys.executable, "-c", FAILS_EARLY, "--port", "0", *flags.format(**names).split()]
        given = environment() | {"NUMBA_CACHE_DIR": ""}
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=given, check=False)
    assert result.returncode == 0, result.stderr
    [line] = result.stderr.splitlines()
    assert line.startswith("draftwood serve: " + problem.format(**names))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("program", [WITHOUT_TORCH, OPTIONS_WITHOUT_NUMBA], ids=["service", "options"])
def test_the_service_beside_the_engine_imports_no_torch_and_options_no_numba(program: str) -> None:
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment(), check=False)
    assert result.returncode == 0, result.stderr


def test_compiled_functions_are_copied_to_where_numba_looks_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "image", tmp_path / "writable"
    (source / "strategies_1").mkdir(parents=True)
    (source / "strategies_1/f.nbi").write_bytes(b"compiled")
    target.mkdir()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(target))
    service = Process(tmp_path, "--compiled-functions", str(source))
    service.process.send_signal(signal.SIGTERM)
    assert service.ends()[0] == 0
    assert (target / "strategies_1/f.nbi").read_bytes() == b"compiled"


def test_an_earlier_ready_file_is_removed_and_nobody_sees_one_too_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only whole files are renamed to it."""
    renamed: list[Path] = []
    monkeypatch.setattr(Path, "replace", lambda part, target: renamed.append(part))
    ready = tmp_path / "ready"
    require_writable("ready_file", ready)
    ready.write_text("of an earlier service")
    require_writable("ready_file", ready)
    assert [*tmp_path.iterdir()] == renamed == []
    with pytest.raises(InvalidValueError, match=r"ready_file .*: cannot be written: is a directory"):
        require_writable("ready_file", tmp_path)
    assert not tmp_path.with_name(tmp_path.name + ".part").exists()


USER = 1_000_650_000
"""As OpenShift chooses them."""


def written(folder: Path, after: Path) -> set[Path]:
    """Files of that user, newer than `after`, in a folder or below it, which others may remove meanwhile."""
    command = ["find", str(folder), "-xdev", "-uid", str(USER), "-type", "f", "-newer", str(after)]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    return {Path(line) for line in listed.stdout.splitlines()}


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="needs root and setpriv, to become another user",
)
@pytest.mark.timeout(300)
def test_a_server_of_any_user_answers_and_writes_where_the_documentation_says(tmp_path: Path) -> None:
    """docs/image.md: /tmp, the cache and the store's folder. Nothing else could be written to."""
    for one in (tmp_path, *tmp_path.parents):
        if Path(tempfile.gettempdir()) in one.parents:
            one.chmod(0o755)
    folders = {name: tmp_path / name for name in ("cache", "store", "tmp")}
    for folder in folders.values():
        folder.mkdir()
        os.chown(folder, 10001, 0)
        folder.chmod(0o770)
    ready, log, begun = folders["tmp"] / "address", tmp_path / "log", tmp_path / "begun"
    begun.touch()
    variables = {
        **os.environ,
        "HOME": str(folders["cache"]),
        "USER": "draftwood",
        "XDG_CACHE_HOME": str(folders["cache"]),
        "NUMBA_CACHE_DIR": str(folders["tmp"] / "draftwood-compiled"),
        "TMPDIR": str(folders["tmp"]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    flags = ["--port", "0", "--ready-file", str(ready), "--threads", "1", "--metrics-port", "0"]
    flags += ["--store", "embedded", "--store-folder", str(folders["store"] / "valkey")]
    # Reading is allowed everywhere, since the interpreter of a test may be in root's folders.
    command = ["setpriv", "--reuid", str(USER), "--regid", "0", "--clear-groups"]
    command += ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    command += [sys.executable, "-m", "draftwood_service", *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=variables, cwd=tmp_path)
    try:
        with Client(wait_for_address(process, ready, log, 400.0), timeout=60) as client:
            assert client.generate("where is my order?", max_tokens=8).text
        elsewhere = {path for place in ("/tmp", "/dev/shm", "/var/tmp") for path in written(Path(place), begun)}
    finally:
        process.terminate()
        assert process.wait(60) == 0, log.read_text()
    used = {name for name, folder in folders.items() if written(folder, begun)}
    assert {"cache", "store"} <= used
    assert not [path for path in elsewhere if tmp_path not in path.parents and path.parent != Path("/dev/shm")]
