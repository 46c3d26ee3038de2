"""Files and folders that settings name, checked before anything large is imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from draftwood_model_runner.errors import InvalidInputError


def require_writable(key: str, path: Path | None) -> None:
    """Removes an old version of a file that is written later, so that nobody reads it meanwhile.

    Raises:
        InvalidInputError: the file cannot be written.
    """
    if path is None:
        return
    with _written_part(key, path) as part:
        path.unlink(missing_ok=True)
        part.unlink()


def write_whole(key: str, path: Path, text: str) -> None:
    """Writes a file in one step for readers: under another name first, then renamed. Raises InvalidInputError."""
    with _written_part(key, path, text) as part:
        part.replace(path)


@contextmanager
def _written_part(key: str, path: Path, text: str = "") -> Iterator[Path]:
    """A file beside another, with its text; no error leaves it there."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        yield part
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise InvalidInputError(key, path, f"cannot be written: {str(error.strerror).lower()}") from None
