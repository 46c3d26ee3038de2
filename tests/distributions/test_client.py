"""The distribution draftwood-client works without anything of the server, and without its own extra."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributions.workspace import Wheel, environment, present, run
from tools.distributions.lock import ROOT

STUBS = {
    path.relative_to(ROOT / "protos").as_posix()
    for path in (ROOT / "protos/draftwood").rglob("*")
    if path.suffix in (".proto", ".py", ".pyi")
}
MAIN = "from draftwood_command import main; main()"
OF_THE_EXTRA = ["rich", "typer", "yaml"]


@pytest.fixture(scope="module")
def client(wheels: dict[str, Wheel]) -> Wheel:
    return wheels["draftwood-client"]


@pytest.fixture(scope="module")
def bare(client: Wheel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the client and what it requires."""
    return environment(tmp_path_factory.mktemp("bare"), [client])


@pytest.fixture(scope="module")
def with_cli(client: Wheel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("cli"), [client], ["cli"])


def test_it_brings_the_stubs(client: Wheel) -> None:
    assert client.files >= STUBS


def test_it_runs_with_its_dependencies_alone(bare: Path) -> None:
    code = (
        "import sys, draftwood_client, draftwood_client.aio\n"
        "import draftwood_client.admin.client, draftwood_client.admin.status\n"
        "from draftwood.v1 import generation_pb2_grpc, memory_pb2_grpc\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & set(sys.argv[1:])))"
    )
    absent = ["draftwood_service", "draftwood_strategies", "numpy", "torch", *OF_THE_EXTRA]
    assert present(bare, *absent) == []
    assert run(bare, code, *absent) == "[]\n"


def test_without_the_extra_the_command_names_it(bare: Path) -> None:
    for arguments in ((), ("--help",), ("complete", "x")):
        said = run(bare, MAIN, *arguments, status=1)
        assert said == "error: `draftwood` needs the extra `cli` of draftwood-client: pip install PyYAML rich typer\n"


def test_with_the_extra_the_command_shows_the_clients_commands(with_cli: Path) -> None:
    assert present(with_cli, *OF_THE_EXTRA) == OF_THE_EXTRA
    shown = run(with_cli, MAIN, "--help")
    assert "complete" in shown
    assert "Serve a model" not in shown


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("serve", "draftwood"),
        ("gateway", "'draftwood[gateway]'"),
        ("demo", "'draftwood[benchmarks]'"),
        ("bench", "'draftwood[benchmarks]'"),
    ],
)
def test_without_the_server_its_commands_name_what_to_install(with_cli: Path, command: str, what: str) -> None:
    said = run(with_cli, MAIN, command, "--help", status=1)
    checkout = "or where no index has that, a checkout of Draftwood: docs/distributions.md there"
    assert said == f"error: `draftwood {command}` needs pip install {what}, {checkout}\n"
