"""How long the machine keeps any process waiting, whatever the tested one does."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from typing import Self

_WATCH = """
import time
while True:
    began = time.monotonic()
    time.sleep(0.005)
    ended = time.monotonic()
    if ended - began > 0.007:
        print(began + 0.005, ended, flush=True)
"""


class Stalls:
    """A process of its own that does nothing but wake up, and records when it woke too late. A context manager."""

    def __enter__(self) -> Self:
        self._notes = tempfile.TemporaryFile("a+b")
        self._process = subprocess.Popen([sys.executable, "-ISc", _WATCH], stdout=self._notes)
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        self._notes.close()

    def between(self, began: float, ended: float) -> float:
        """Seconds that the machine kept it waiting between two readings of `time.monotonic`."""
        time.sleep(0.02)  # stalls that began before `ended` are recorded
        self._notes.seek(0)
        lines = self._notes.read().split(b"\n")[:-1]  # the last line may be incomplete
        late = [[float(value) for value in line.split()] for line in lines]
        return sum(max(0.0, min(ended, end) - max(began, start)) for start, end in late)
