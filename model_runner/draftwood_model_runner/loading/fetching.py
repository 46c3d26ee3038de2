"""Downloads a model of the hub or of S3 to a folder that several processes share, as init containers of replicas do.

The hub's own client downloads: it goes on with what was cut off. Then each file's checksum is compared with the hub's.
`s3` does the same with objects. A note in the folder says what is complete, so that a later start asks nobody.
"""

from __future__ import annotations

import fcntl
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from draftwood_model_runner.errors import InvalidInputError, ModelNotFoundError
from draftwood_model_runner.loading import s3
from draftwood_model_runner.loading.checkpoint import checkpoint_files
from draftwood_model_runner.loading.s3 import S3Model

_log = logging.getLogger(__name__)
_NOTE = ".draftwood-fetched"
_LOCK = ".draftwood-lock"
_FORM = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(/(?P<file>[\w./-]+\.gguf))?(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the hub, or one GGUF file of it.

    Attributes:
        repo: its id.
        file: of the repository; None for a checkpoint of transformers.
        revision: branch, tag or commit; None for the main branch.
    """

    repo: str
    file: str | None
    revision: str | None

    @classmethod
    def of(cls, text: str) -> Self:
        """Reads ORG/NAME, ORG/NAME@REVISION or ORG/NAME/FILE.gguf. Raises InvalidInputError."""
        match = _FORM.fullmatch(text)
        if match is None or ".." in text:
            forms = "org/name, org/name@revision, org/name/file.gguf, s3://bucket/folder or s3://bucket/path/file.gguf"
            raise InvalidInputError("model", text, f"must look like {forms}")
        return cls(match["repo"], match["file"], match["revision"])

    def wanted(self, files: list[str]) -> list[str]:
        """Those of a repository's files that are downloaded. Raises ModelNotFoundError if there is none."""
        found = checkpoint_files(files) if self.file is None else [name for name in files if name == self.file]
        if not found:
            raise ModelNotFoundError(f"model {self.repo!r}: the repository has no {self.file or 'checkpoint'}")
        return found


def fetch_to(source: str, folder: Path) -> bool:
    """Downloads a model, unless it is complete. Variables have the addresses and credentials of the hub and of S3.

    Args:
        source: see `HubModel.of` and `S3Model.of`.
        folder: made if it is missing. Another process that fetches to it is waited for.

    Returns:
        Whether something was downloaded.

    Raises:
        InvalidInputError: the source has another form.
        ModelNotFoundError: nobody gives it, a checksum differs, or the folder has another model.
        ModuleNotFoundError: it is in S3, and the extra `s3` is not installed.
    """
    wanted = S3Model.of(source) if source.startswith("s3:") else HubModel.of(source)
    try:
        with _locked(folder):
            if (known := _noted(folder)) is not None:
                if known != source:
                    problem = f"has {known}; take another folder, or empty it"
                    raise ModelNotFoundError(f"model {source!r}: folder {folder} {problem}")
                return False
            pinned = _pinned(wanted, folder)
            part = folder / f"{_NOTE}.part"
            part.write_text(json.dumps({"source": source, **pinned}), encoding="utf-8")
            part.replace(folder / _NOTE)
            return True
    except OSError as error:  # the hub's errors are such, too
        text = " ".join(str(error).split())
        raise ModelNotFoundError(f"model {source!r}: cannot be downloaded to {folder}: {text[:300]}") from error


def _pinned(wanted: HubModel | S3Model, folder: Path) -> dict[str, object]:
    """Downloads a model, and returns which one it was, for the note."""
    if isinstance(wanted, S3Model):
        return {"objects": s3.download(wanted, folder)}
    return {"commit": _download(wanted, folder)}


def _download(wanted: HubModel, folder: Path) -> str:
    """The commit that was downloaded."""
    # Imported here: it takes a while, and its settings are those of the environment at that time.
    from huggingface_hub import HfApi, snapshot_download

    hub = HfApi()
    info = hub.model_info(wanted.repo, revision=wanted.revision)
    commit = str(info.sha)
    files = wanted.wanted([file.rfilename for file in info.siblings or ()])
    _log.info("%s: downloading %d files of commit %s to %s", wanted.repo, len(files), commit, folder)
    snapshot_download(wanted.repo, revision=commit, local_dir=folder, allow_patterns=files)
    wrong = hub.verify_repo_checksums(wanted.repo, revision=commit, local_dir=folder).mismatches
    for mismatch in wrong:
        (folder / mismatch["path"]).unlink()  # the next attempt downloads it again
    if wrong:
        first = f"{wrong[0]['path']} has {wrong[0]['algorithm']} {wrong[0]['actual']}, not {wrong[0]['expected']}"
        raise ModelNotFoundError(f"model {wanted.repo!r}: {first} ({len(wrong)} of {len(files)} files)")
    return commit


def _noted(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / _NOTE).read_bytes())["source"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise ModelNotFoundError(f"{folder / _NOTE} cannot be read; delete it") from None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
