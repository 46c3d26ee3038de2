"""GGUF files as ordinary folders: their weights are made dense once, and kept in the folder of converted models.

All other code sees such a folder only. It is keyed by the file's content, and has the name that clients see. Weights
are kept in bfloat16: docs/decisions has what that changes. One process at a time writes here, into a temporary folder
that is renamed when it is complete. No torch: a child process converts.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from draftwood_model_runner.errors import ModelNotFoundError, UnsupportedModelError
from draftwood_model_runner.loading.sources.file_digests import KNOWN_DIGESTS, KnownDigests, is_private

_log = logging.getLogger(__name__)

DENSE = "dense"
"""The folder of all of them, in that of converted models."""
UNREADABLE, UNSUPPORTED = 3, 4
"""Exit statuses of the conversion, with the reason on standard output: a file that cannot be read or written, and a
model that transformers does not read from a GGUF file."""
_FORMAT = 1
"""Another number makes all files be converted again."""
_CONVERSION = "draftwood_model_runner.loading.sources.gguf_conversion"


def dense_place(cache: Path, sha256: str, name: str) -> Path:
    """Where the dense folder of a GGUF file is, or will be.

    Args:
        sha256: of the file, in hexadecimal digits.
        name: that clients see.
    """
    return cache / DENSE / hashlib.sha256(f"{_FORMAT} {sha256}".encode()).hexdigest()[:32] / name


def dense_folder(file: Path, cache: Path | None) -> Path:
    """The dense folder of a GGUF file, which is made if there is none. It is called as the file without its ending.

    Raises:
        ModelNotFoundError: the file cannot be read, or the folder not be written; gives the reason.
        UnsupportedModelError: transformers does not read such a model from a GGUF file.
    """
    with file_errors(str(file)):
        with file.open("rb") as opened:
            begins = opened.read(4)
        if begins != b"GGUF":
            problem = f"is not a GGUF file (it begins with {begins!r}); give one, or a folder that has config.json"
            raise ModelNotFoundError(f"model {str(file)!r}: {problem} and the weights")
        cache = required(cache, str(file))
        [sha256] = KnownDigests(cache / KNOWN_DIGESTS).sha256([file])
        folder = dense_place(cache, sha256, file.stem)
        if not is_used(folder):
            with writing(folder) as part:
                if part is not None:
                    convert(file, part, str(file))
    return folder


def required(cache: Path | None, model: str) -> Path:
    """The folder of converted models. Raises ModelNotFoundError if there is none."""
    if cache is None:
        problem = "its weights are kept in the folder of converted models; set --model-cache-folder"
        raise ModelNotFoundError(f"model {model!r}: {problem}, and leave --no-model-cache out")
    return cache


def is_used(folder: Path) -> bool:
    """Whether a dense folder is there; if so, the time of its last use is now."""
    if not folder.is_dir():
        return False
    with suppress(OSError):  # of a folder that is mounted to be read
        os.utime(folder)
    return True


@contextmanager
def file_errors(model: str) -> Iterator[None]:
    """Errors of files in the terms of the model."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise ModelNotFoundError(f"model {model!r}: {where}{(error.strerror or '').lower() or error}") from error


@contextmanager
def writing(folder: Path) -> Iterator[Path | None]:
    """A temporary folder that becomes a dense folder when the context ends; None if another process made it meanwhile.

    Nothing else writes to the folder of all dense ones meanwhile, so what is half-written there was left by a process
    that was killed, and is removed.

    Raises:
        OSError: the folder cannot be made, or others may write to it.
    """
    root = folder.parents[1]
    require_private(root.parent)
    root.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(root, os.O_RDONLY)
    try:
        _lock(descriptor)
        for left in root.glob("part-*"):
            shutil.rmtree(left, ignore_errors=True)
        if folder.is_dir():
            yield None
            return
        with tempfile.TemporaryDirectory(prefix="part-", dir=root, ignore_cleanup_errors=True) as part:
            written = Path(part, "model")
            written.mkdir()
            yield written
            folder.parent.mkdir(exist_ok=True)
            written.rename(folder)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Waits until no other process has the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _log.info("another process prepares a model: waiting until it has finished")
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def convert(file: Path, folder: Path, model: str) -> None:
    """Writes the dense folder of a GGUF file, in a child process.

    Args:
        model: for errors.

    Raises:
        ModelNotFoundError, UnsupportedModelError: as `dense_folder`.
    """
    _log.info("%s: its weights are made dense, once", model)
    command = [sys.executable, "-P", "-m", _CONVERSION, str(file.absolute()), str(folder)]
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environ, check=False)
    if done.returncode in (UNREADABLE, UNSUPPORTED):
        kind = ModelNotFoundError if done.returncode == UNREADABLE else UnsupportedModelError
        raise kind(f"model {model!r}: {done.stdout.strip()}")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it gave no reason"])[-1]
        reason = "it was killed, as if memory ran out" if done.returncode < 0 else last
        raise ModelNotFoundError(f"model {model!r}: its weights cannot be made dense: {reason}")


def require_private(cache: Path) -> None:
    """Makes the folder for this user alone.

    Raises:
        OSError: it cannot be made, or others may write to it.
    """
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(cache):
        raise PermissionError(f"{cache} must belong to the user of the service, and no other may write to it")
