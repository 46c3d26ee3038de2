"""The console script: a sign of life from every command, and Ctrl-C without a traceback."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import typer

from draftwood_benchmarks.commands import COMMANDS as BENCHMARKS
from draftwood_client.cli import build_app
from tests.client.terminal import Terminal

_SECONDS = 15.0
"""For the first byte: two on a machine with nothing else to do."""
_SERVES = {"serve": ["--port", "0"], "gateway": ["--port", "0"]}
SOME = {"info", "complete", "memory stats", "experiment replay", "key", "serve", "gateway", "demo", "bench step"}
_ARGUMENTS = {"complete": ["x"], "tokenize": ["x"], "detokenize": ["1"], **_SERVES}


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@contextmanager
def started(*arguments: str, target: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a process group of its own, which is killed in the end."""
    command = [sys.executable, "-m", "draftwood_command", *arguments]
    env = {**os.environ, "DRAFTWOOD_TARGET": target}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, process_group=0
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def seconds_to_first_byte(process: subprocess.Popen[bytes]) -> float:
    began = time.monotonic()
    assert process.stdout is not None
    assert process.stderr is not None
    ready, _, _ = select.select([process.stdout, process.stderr], [], [], 4 * _SECONDS)
    return time.monotonic() - began if ready else float("inf")


def all_commands() -> list[list[str]]:
    """Every subcommand, with arguments where it would otherwise only say that they are missing."""

    def below(command: Any, path: list[str]) -> Iterator[list[str]]:
        if not hasattr(command, "commands"):
            yield [*path, *_ARGUMENTS.get(path[-1], [])]
            return
        for name, inner in command.commands.items():
            yield from below(inner, [*path, name])

    found = [one for one in below(typer.main.get_command(build_app()), []) if one != ["bench"]]
    return found + [["bench", name] for name in BENCHMARKS]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("names", [SOME, pytest.param(None, marks=pytest.mark.slow)])
def test_commands_give_a_sign_of_life(names: set[str] | None, silent: str) -> None:
    def measured(arguments: list[str]) -> tuple[str, float]:
        with started(*arguments, target=silent) as process:
            return " ".join(arguments), seconds_to_first_byte(process)

    commands = all_commands()
    assert ["memory", "stats"] in commands
    assert ["experiment", "replay"] in commands
    if names:
        commands = [one for one in commands if {one[0], " ".join(one[:2])} & names]
    with ThreadPoolExecutor(2) as pool:
        slow = {name: seconds for name, seconds in pool.map(measured, commands) if seconds > _SECONDS}
    assert not slow


@pytest.mark.parametrize("arguments", [["info"], ["demo"], ["bench", "step"], ["serve", "--port", "0"]])
def test_ctrl_c_is_quiet_while_a_command_works(arguments: list[str], silent: str) -> None:
    with started(*arguments, target=silent) as process:
        seconds_to_first_byte(process)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert b"Abort" not in errors


def test_ctrl_c_is_quiet_while_the_client_is_imported() -> None:
    interrupting = (
        "import os, signal, sys, draftwood_command\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'draftwood_client': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "draftwood_command.main()"
    )
    done = subprocess.run([sys.executable, "-c", interrupting, "info"], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_ctrl_c_in_a_text_that_is_executed_has_the_usual_status(tmp_path: Path) -> None:
    """`python -m` ends itself by the signal then, even if it was handled."""
    (tmp_path / "interrupted.py").write_text(
        "import atexit, draftwood_command, draftwood_client.cli as cli\n"
        "cli.main = lambda: (atexit.register(print, 'cleaned up'), exec('raise KeyboardInterrupt'))\n"
        "draftwood_command.main()"
    )
    done = subprocess.run([sys.executable, "-m", "interrupted"], capture_output=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"cleaned up\n", b"")


def test_ctrl_c_at_a_question_is_quiet(silent: str) -> None:
    with Terminal("memory", "purge", "--tenant", "t", target=silent) as terminal:
        terminal.wait_for("[y/N]")
        for _ in range(20):  # readline ignores one that comes between its prompt and its wait
            terminal.interrupt()
            with suppress(subprocess.TimeoutExpired):
                terminal.process.wait(1)
                break
        assert terminal.process.returncode == 130
        terminal.read_rest()
        assert "Abort" not in terminal.shown
