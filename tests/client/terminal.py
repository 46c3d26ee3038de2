"""The `draftwood` command in a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from typing import Self

import pytest

_WAIT_SECONDS = 60.0
"""Two are enough on a machine with nothing else to do."""


class Terminal:
    """Runs a command until the context is left."""

    def __init__(self, *args: str, target: str) -> None:
        env = {**os.environ, "DRAFTWOOD_TARGET": target, "TERM": "xterm", "NO_COLOR": "", "FORCE_COLOR": ""}
        self._fd, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        command = [sys.executable, "-m", "draftwood_command", *args]
        self.process = subprocess.Popen(
            command, stdin=inner, stdout=inner, stderr=inner, env=env, start_new_session=True, close_fds=True
        )
        os.close(inner)
        self.shown = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        os.close(self._fd)

    def type(self, text: str) -> None:
        """Types once a prompt is shown: what comes earlier, readline may not see, as with Python's own prompt."""
        os.write(self._fd, text.encode())

    def interrupt(self) -> None:
        """Presses Ctrl-C."""
        os.killpg(self.process.pid, signal.SIGINT)

    def interrupt_until(self, text: str) -> None:
        """Presses Ctrl-C until `text` is shown: readline ignores one that comes between its prompt and its wait."""
        end = time.monotonic() + _WAIT_SECONDS
        ready: list[int] = []
        while not ready:
            assert time.monotonic() < end, f"{text!r} did not come"
            self.interrupt()
            ready, _, _ = select.select([self._fd], [], [], 5)
        self.wait_for(text)

    def wait_for(self, text: str) -> str:
        """Reads until `text` is shown, after the text of the previous wait; returns what was shown before it."""
        end = time.monotonic() + _WAIT_SECONDS
        while text not in self.shown:
            ready, _, _ = select.select([self._fd], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"{text!r} did not come; there is {self.shown!r}"
            try:
                self.shown += os.read(self._fd, 4096).decode()
            except OSError:
                pytest.fail(f"{text!r} did not come before the end; there is {self.shown!r}")
        before, _, self.shown = self.shown.partition(text)
        return before

    def wait_for_output(self, seconds: float) -> bool:
        """Whether anything is shown in time."""
        ready, _, _ = select.select([self._fd], [], [], seconds)
        return bool(ready)

    def read_rest(self) -> None:
        """Reads what an ended command has written."""
        try:
            while part := os.read(self._fd, 4096):
                self.shown += part.decode()
        except OSError:  # the end of a pseudo-terminal
            pass

    def end(self) -> int:
        """The exit status."""
        return self.process.wait(_WAIT_SECONDS)
