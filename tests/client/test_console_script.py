"""The console script: a sign of life from every command, and no traceback at Ctrl-C or on a full disk."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer

from draftwood_benchmarks.commands import COMMANDS as BENCHMARKS
from draftwood_client.cli import build_app
from tests.client.fake_server import FakeServer
from tests.client.terminal import Terminal

_SECONDS = 30.0
"""For the first byte: two on a machine with nothing else to do. At most three are promised, after Python's start."""
_COMMAND = [sys.executable, "-m", "draftwood_command"]
_SERVES = {"serve": ["--port", "0"], "gateway": ["--port", "0"]}
SOME = {"info", "complete", "memory stats", "key", "serve", "gateway", "demo", "bench step"}
_ARGUMENTS = {"complete": ["x"], "tokenize": ["x"], "detokenize": ["1"], **_SERVES}


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def all_commands() -> list[list[str]]:
    """Every subcommand, with arguments where it would otherwise only say that they are missing."""

    def below(command: Any, path: list[str]) -> Iterator[list[str]]:
        if not hasattr(command, "commands"):
            yield [*path, *_ARGUMENTS.get(path[-1], [])]
            return
        for name, inner in command.commands.items():
            yield from below(inner, [*path, name])

    commands = [words for words in below(typer.main.get_command(build_app()), []) if words != ["bench"]]
    return commands + [["bench", name] for name in BENCHMARKS]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("names", [SOME, pytest.param(None, marks=pytest.mark.slow)])
def test_commands_give_a_sign_of_life(names: set[str] | None, silent: str) -> None:
    def measured(arguments: list[str]) -> tuple[str, bool]:
        with Terminal(*arguments, target=silent) as terminal:
            return " ".join(arguments), terminal.wait_for_output(_SECONDS)

    commands = all_commands()
    assert ["memory", "stats"] in commands
    if names:
        commands = [words for words in commands if {words[0], " ".join(words[:2])} & names]
    with ThreadPoolExecutor(2) as pool:
        slow = [name for name, in_time in pool.map(measured, commands) if not in_time]
    assert not slow


def test_a_sign_of_life_is_for_terminals_and_erased_by_what_follows_it(silent: str) -> None:
    with Terminal("info", "--timeout", "8", target=silent) as terminal:
        arguments = ["info", "--timeout", "5", "--target", silent]
        done = subprocess.run([*_COMMAND, *arguments], capture_output=True, timeout=100, check=False)
        assert done.stderr.startswith(b"error: ")
        terminal.wait_for("draftwood: working, no output yet (3 s)")
        terminal.wait_for("\r\x1b[Kerror: ")
        assert terminal.end() == 1


@pytest.mark.parametrize("arguments", [["info"], ["demo"], ["bench", "step"], ["serve", "--port", "0"]])
def test_ctrl_c_is_quiet_while_a_command_works(arguments: list[str], silent: str) -> None:
    with Terminal(*arguments, target=silent) as terminal:
        assert terminal.wait_for_output(_SECONDS)
        terminal.interrupt()
        assert terminal.end() == 130
        terminal.read_rest()
    assert "Traceback" not in terminal.shown
    assert "Abort" not in terminal.shown


def test_ctrl_c_is_quiet_while_the_client_is_imported() -> None:
    interrupting = (
        "import os, signal, sys, draftwood_command\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'draftwood_client': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "draftwood_command.main()"
    )
    done = subprocess.run([sys.executable, "-c", interrupting, "info"], capture_output=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
@pytest.mark.parametrize(
    "arguments", [["--version"], ["info"], ["chat", "x"], ["chat"], ["complete", "x", "--json"], ["models"]]
)
def test_output_that_cannot_be_written_is_one_line(arguments: list[str], server: FakeServer) -> None:
    """Whether a command writes as it goes, or Python at its end."""
    with Path("/dev/full").open("wb") as full:
        done = run_command(arguments, server, stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (1, b"error: stdout cannot be written: No space left on device\n")


def test_output_that_nobody_reads_is_quiet(server: FakeServer) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as closed:
        done = run_command(["chat", "x"], server, stdout=closed, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize(
    ("closed", "arguments", "status", "error"),
    [
        (">&-", ["chat", "x"], 0, b""),
        ("<&-", ["chat", "-"], 2, b"error: QUESTION: is empty\n"),
        ("2>&-", ["chat"], 0, b""),
    ],
)
def test_streams_may_be_closed(
    closed: str, arguments: list[str], status: int, error: bytes, server: FakeServer
) -> None:
    done = run_command(arguments, server, "/bin/sh", "-c", f'exec "$@" {closed}', "sh", stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (status, error)


def run_command(
    arguments: list[str], server: FakeServer, *before: str, **streams: Any
) -> subprocess.CompletedProcess[bytes]:
    env = {**os.environ, "DRAFTWOOD_TARGET": server.target}
    return subprocess.run([*before, *_COMMAND, *arguments], env=env, input=b"x\n", timeout=100, **streams)


def test_ctrl_c_at_a_question_is_quiet(silent: str) -> None:
    with Terminal("memory", "purge", "--tenant", "t", target=silent) as terminal:
        terminal.wait_for("[y/N]")
        for _ in range(20):  # readline ignores one that comes between its prompt and its wait
            terminal.interrupt()
            with suppress(subprocess.TimeoutExpired):
                terminal.process.wait(3)
                break
        assert terminal.process.returncode == 130
        terminal.read_rest()
        assert "Abort" not in terminal.shown
