"""Keys that are pressed while the screen is shown."""

from __future__ import annotations

import os
import select
import sys
import time
from types import TracebackType
from typing import Self

try:
    import termios
    import tty
except ImportError:  # Windows has no termios: the view works without keys
    termios = None  # type: ignore[assignment]


class Keys:
    """Context manager that reads single keys from the terminal, without echo; none if stdin is no terminal."""

    def __init__(self) -> None:
        self._terminal = sys.stdin.fileno() if termios is not None and sys.stdin.isatty() else None

    def __enter__(self) -> Self:
        if self._terminal is not None:
            self._settings = termios.tcgetattr(self._terminal)
            tty.setcbreak(self._terminal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._terminal is not None:
            termios.tcsetattr(self._terminal, termios.TCSADRAIN, self._settings)

    def wait(self, seconds: float) -> str:
        """The keys pressed since the last call; waits for one, at most so long."""
        if self._terminal is None:
            time.sleep(seconds)
            return ""
        if not select.select([self._terminal], [], [], seconds)[0]:
            return ""
        pressed = os.read(self._terminal, 1024)
        if not pressed:
            time.sleep(seconds)  # stdin has ended: it would always be ready
        return pressed.decode(errors="ignore")
