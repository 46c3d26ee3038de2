"""An engine's metrics in the `/metrics` of its server, which is another process.

The engine's process writes files of prometheus_client's multi-process mode into a folder that the environment names. A
server in that mode reads all files of its folder by itself. Any other reads those of its own engines at a scrape: of
live processes that descend from it. Imports nothing but the standard library before that: engines load it in all of
their processes.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftwood_memory.engines.draft_metrics import DataPoint

_log = logging.getLogger("draftwood")

_SHARED = "PROMETHEUS_MULTIPROC_DIR"
"""The folder of prometheus_client's multi-process mode; it must exist."""
_OWN = "_DRAFTWOOD_METRICS_DIR"
"""The folder in any other mode: named by the first process, inherited by its children, made when one of them writes."""
_NAME = "draftwood"
"""Part of the names of files, beside those that the process writes itself."""
_shown = False


def show_metrics() -> None:
    """Called once or more in each process of a server, before it has children: shows its engines' metrics.

    Does nothing where prometheus_client is missing.
    """
    global _shown
    if _shown or _SHARED in os.environ:
        return
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        return
    _shown = True
    choose_folder(os.environ)
    REGISTRY.register(_EnginesOfServer())


def choose_folder(environ: MutableMapping[str, str]) -> None:
    """Names the folder for this process and its children, unless a parent did. It is deleted when this one ends."""
    if _OWN not in environ:
        # A name that nobody can guess: the folder is made by another process.
        folder = Path(tempfile.gettempdir(), f"draftwood-metrics-{os.urandom(16).hex()}")
        environ[_OWN] = str(folder)
        atexit.register(_delete, folder, os.getpid())


def _delete(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # and not a fork of it
        shutil.rmtree(folder, ignore_errors=True)


def folder_of(environ: Mapping[str, str]) -> Path | None:
    """Where an engine's process writes; None for nowhere."""
    name = environ.get(_SHARED) or environ.get(_OWN)
    return Path(name) if name else None


class MetricFiles:
    """The files of this process.

    Args:
        folder: see `folder_of`; made if it is missing.

    Raises:
        ImportError: prometheus_client is missing, or of a version that is not known.
        OSError: the folder cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        from prometheus_client.mmap_dict import MmapedDict

        folder.mkdir(mode=0o700, exist_ok=True)
        for path in folder.glob(f"gauge_*_{_NAME}-*.db"):  # of a run before, where the folder outlives one
            if not _lives(_pid_of(path)):
                path.unlink(missing_ok=True)
        self._folder = folder
        self._open: Any = MmapedDict
        self._files: dict[str, tuple[Path, Any]] = {}

    def write(self, points: Iterable[DataPoint]) -> None:
        """Takes the place of all values written before."""
        from prometheus_client.mmap_dict import mmap_key

        now = time.time()
        for metric, labels, value in points:
            counter = metric.kind.value == "counter"
            kind = "counter" if counter else f"gauge_live{metric.kind.value}"
            sample = f"{metric.name}_total" if counter else metric.name
            key = mmap_key(metric.name, sample, [*labels], [*labels.values()], metric.description)
            self._file(kind).write_value(key, float(value), now)

    def close(self) -> None:
        """Deletes the gauges. Counters stay in a folder that others share: what they count was done."""
        for path, file in self._files.values():
            file.close()
            if path.name.startswith("gauge_"):
                path.unlink(missing_ok=True)
        self._files.clear()

    def _file(self, kind: str) -> Any:
        if kind not in self._files:
            path = self._folder / f"{kind}_{_NAME}-{os.getpid()}.db"
            unready = path.with_suffix(".new")
            unready.unlink(missing_ok=True)
            file = self._open(str(unready))
            unready.rename(path)  # readers take every file of this ending, and fail for an empty one
            self._files[kind] = path, file
        return self._files[kind][1]


class _EnginesOfServer:
    """A collector of prometheus_client: the metrics of all engines that descend from this process."""

    def collect(self) -> Iterable[Any]:
        """The metrics; none where they cannot be read."""
        from prometheus_client.multiprocess import MultiProcessCollector

        folder = os.environ.get(_OWN)
        if not folder:
            return []
        try:
            files = [str(path) for path in Path(folder).glob(f"*_{_NAME}-*.db") if _descends(_pid_of(path))]
            merge: Any = MultiProcessCollector.merge
            return list(merge(files))
        except Exception:
            _log.exception("metrics of drafts cannot be read")
            return []


def _pid_of(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except ProcessLookupError:
        return False
    return True


def _descends(pid: int) -> bool:
    """Whether a process lives and is this one, or its child, or a child's; true if that cannot be told."""
    if not Path("/proc/self/stat").exists():
        return True
    while pid > 0:
        if pid == os.getpid():
            return True
        try:
            state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            return False
        if state in "ZX":
            return False
        pid = int(parent)
    return False
