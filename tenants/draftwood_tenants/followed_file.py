"""A file that is read again when it changes, so that a change needs no restart."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from draftwood_errors import InvalidInputError, InvalidValueError

T = TypeVar("T")

_log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Polling interval. Kubernetes itself takes up to a minute until a changed secret is in the pod."""
_WRITTEN_SECONDS = 0.1
"""A file that has changed is read again after so long, and used if it is the same: an editor may write it in parts."""


@contextmanager
def of_file(setting: str, path: Path) -> Iterator[None]:
    """Errors of a file's content name the file. Raises InvalidInputError."""
    try:
        yield
    except InvalidValueError as error:
        raise InvalidInputError(setting, path, error.allowed if error.field == setting else str(error)) from None


class FollowedFile(Generic[T]):
    """The content of a file, by the latest version that could be read.

    Args:
        setting: that names the file, for errors.
        read: makes the value; raises InvalidInputError for a content that is wrong.

    Raises:
        InvalidInputError: the file cannot be read now.
    """

    def __init__(self, setting: str, path: Path, read: Callable[[bytes], T]) -> None:
        self._setting = setting
        self._path = path
        self._read = read
        self._bytes = self._content()
        with of_file(setting, path):
            self.value = read(self._bytes)

    async def follow(self) -> None:
        """Looks again and again, for ever. A version that cannot be read is logged once, and the one before stays."""
        problem = ""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                if await asyncio.to_thread(self.look):
                    _log.info("%s %s was read again", self._setting, self._path)
                problem = ""
            except Exception as error:  # whatever a file contains, the next version of it is read
                if str(error) != problem:
                    problem = str(error)
                    _log.error(
                        "%s %s cannot be read again; the version before stays in use: %s",
                        self._setting,
                        self._path,
                        problem,
                    )

    def look(self) -> bool:
        """Reads the file, and whether it has changed. One that is being written is left to the next call. Raises what
        `read` raises, or InvalidInputError."""
        content = self._content()
        if content == self._bytes:
            return False
        time.sleep(_WRITTEN_SECONDS)
        if self._content() != content:
            return False
        self.value = self._read(content)
        self._bytes = content
        return True

    def _content(self) -> bytes:
        try:
            return self._path.read_bytes()
        except OSError as error:
            raise InvalidInputError(self._setting, self._path, f"cannot be read: {error.strerror}") from None
