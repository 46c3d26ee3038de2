"""What the last process on this machine found in a store: whether there were any tenants or experiments.

A server that starts while its store does not answer cannot know that. Without this it would have to refuse all
requests, also where no tenant was ever configured.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

_NONE, _SOME = "none", "some"
_VALID_SECONDS = 86_400.0
"""How long "none" is believed while the store does not answer. A restart takes minutes."""
_REWRITE_SECONDS = 3_600.0
"""Minimum interval between two writes of the same word."""


class PresenceNote:
    """A file of one word. A folder that cannot be used counts as one without the file.

    Attributes:
        path: of the file.

    Args:
        store: identifies it.
        clock: seconds since the epoch.
    """

    def __init__(self, folder: Path, store: str, clock: Callable[[], float] = time.time) -> None:
        self.path = folder / f"tenants-{hashlib.sha256(store.encode()).hexdigest()[:16]}"
        self._clock = clock
        self._noted: tuple[str, float] = ("", 0.0)

    async def none_lately(self) -> bool:
        """Whether there were none within the last day."""
        word, at = await asyncio.to_thread(self._read)
        return word == _NONE and abs(self._clock() - at) < _VALID_SECONDS

    async def had_some(self) -> bool:
        """Whether there were some, however long ago."""
        word = self._noted[0] or (await asyncio.to_thread(self._read))[0]
        return word == _SOME

    async def note(self, some: bool) -> None:
        """Writes it for later processes."""
        word, now = _SOME if some else _NONE, self._clock()
        if self._noted[0] != word or now - self._noted[1] > _REWRITE_SECONDS:
            self._noted = word, now
            await asyncio.to_thread(self._write, word)

    def _read(self) -> tuple[str, float]:
        try:
            return self.path.read_text(encoding="ascii"), self.path.stat().st_mtime
        except (OSError, ValueError):
            return "", 0.0

    def _write(self, word: str) -> None:
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile("w", dir=self.path.parent, delete=False) as file:
                file.write(word)
            Path(file.name).replace(self.path)
