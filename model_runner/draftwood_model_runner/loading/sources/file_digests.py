"""Digests of files. Those of large ones are remembered, so that a start need not read gigabytes again."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

KNOWN_DIGESTS = "digests.json"
"""Name of the file in the folder of converted models."""
_SETTLED_NS = 2_000_000_000
"""A file that has not changed for so long when it is read has another change time if it changes later."""


class KnownDigests:
    """Digests of file contents, remembered in a file with the size, inode and times of each.

    A content that changes gets another change time, which no program can set.

    Args:
        path: of the file. If it cannot be read or written, or others may write to its folder, all is read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def digest(self, files: Sequence[Path]) -> str:
        """Of names and contents. Raises OSError."""
        contents = self.sha256(files)
        return _joined([f"{file.name} {content}" for file, content in zip(files, contents, strict=True)])

    def sha256(self, files: Sequence[Path]) -> list[str]:
        """Of each file's content, in hexadecimal digits. Raises OSError."""
        known = self._read()
        found = {str(file.resolve()): _content(file, known.get(str(file.resolve()))) for file in files}
        if any(known.get(name) != of_file for name, of_file in found.items()):
            kept = {name: of_file for name, of_file in known.items() if Path(name).exists()}
            with suppress(OSError):
                self._path.write_text(json.dumps(kept | found), encoding="utf-8")
        return [of_file[-1] for of_file in found.values()]

    def _read(self) -> dict[str, list[str]]:
        try:
            if not is_private(self._path.parent):
                return {}
            known = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        whole = isinstance(known, dict) and all(isinstance(one, list) and len(one) == 2 for one in known.values())
        return known if whole else {}


def is_private(folder: Path) -> bool:
    """Whether a folder belongs to this user, and no other may write to it. Raises OSError."""
    status = folder.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def digest_of_contents(files: Sequence[Path]) -> str:
    """Of names and contents, all of which are read. Raises OSError."""
    return _joined([f"{file.name} {_digest(file)}" for file in files])


def _content(file: Path, known: list[str] | None) -> list[str]:
    """What tells a version of a file from others, and its digest."""
    status = file.stat()
    numbers = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    version = " ".join(map(str, numbers))
    if known is not None and known[0] == version:
        return known
    settled = time.time_ns() - status.st_ctime_ns > _SETTLED_NS
    return [version if settled else "", _digest(file)]


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _joined(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
