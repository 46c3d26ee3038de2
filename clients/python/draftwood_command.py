"""The console script `draftwood`: quiet at Ctrl-C, one line on a full disk, and never silent for long on a terminal.

A module of its own, so that all of it holds from the first moment on, while `draftwood_client` is imported.
"""

from __future__ import annotations

import _thread
import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import NoReturn

FAILURE, INTERRUPTED = 1, 130
_EXTRA = ("rich", "typer", "yaml")
"""What the extra `cli` of draftwood-client brings."""
_SILENT_SECONDS = 3.0
"""Seconds of silence until the status line is shown or updated."""
_ERASE_LINE = "\r\x1b[K"


def main() -> NoReturn:
    """Runs the command of `sys.argv`."""
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored, as under nohup
    if handled:
        signal.signal(signal.SIGINT, _leave)
    sys.unraisablehook = _interrupt_again
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else gRPC writes each failed TLS handshake beside our error
    _watch_silence()
    status: int | str | None = 0

    def leave_if_interrupted() -> None:
        """`python -m` ends itself by SIGINT, without a status, where Ctrl-C met a text that `exec` ran, as of a
        dataclass, even if it was handled. Registered first, this is the last of what runs at the exit."""
        if status == INTERRUPTED:
            with suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            _leave()

    atexit.register(leave_if_interrupted)
    try:
        run = _command_line()
        if handled:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:
        status = INTERRUPTED
    except SystemExit as ended:
        status = ended.code
    except _UnwritableError as error:
        status = _failed(error)
    except Exception as error:
        if not _is_of_interrupt(error):
            raise
        status = INTERRUPTED
    if handled:
        signal.signal(signal.SIGINT, _leave)
    try:
        sys.stdout.flush()
    except _UnwritableError as error:
        status = _failed(error)
    sys.exit(status)


def _failed(error: _UnwritableError) -> int:
    """Says why, and returns the exit status. Nobody reads on where a pipe was closed, as by `head`."""
    if not isinstance(error.__cause__, BrokenPipeError):
        with suppress(OSError):
            print(f"error: {error}", file=sys.stderr)
    return FAILURE


def _command_line() -> Callable[[], None]:
    """The command line's own `main`. Prints one line and exits if the packages of its extra are not installed."""
    try:
        from draftwood_client.cli import main as run
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        needed = "the extra `cli` of draftwood-client: pip install PyYAML rich typer"
        print(f"error: `draftwood` needs {needed}", file=sys.stderr)
        sys.exit(1)
    return run


def _interrupt_again(ignored: sys.UnraisableHookArgs) -> None:
    """Ctrl-C met a callback or destructor, which cannot raise: the main thread is interrupted once more."""
    if issubclass(ignored.exc_type, KeyboardInterrupt):
        _thread.interrupt_main()
    else:
        sys.__unraisablehook__(ignored)


def _is_of_interrupt(error: BaseException) -> bool:
    """Whether an error came of Ctrl-C, as of an extension that could not be imported for it."""
    cause = error.__cause__ or error.__context__
    return isinstance(error, KeyboardInterrupt) or (cause is not None and _is_of_interrupt(cause))


def _leave(*signal_and_frame: object) -> NoReturn:
    if _status_line is not None:
        _status_line.interrupted()
    os._exit(INTERRUPTED)


class _StatusLine:
    """A line on the terminal that says that the command runs. It is erased as soon as the command writes something."""

    def __init__(self, terminal: TextIOWrapper) -> None:
        self._terminal = terminal
        self._lock = threading.RLock()  # a signal's handler may come while its thread holds it
        self._shown = False
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="sign of life", daemon=True).start()

    def end(self) -> None:
        """The command writes, or has ended."""
        if self._ended.is_set():
            return
        with self._lock:
            self._ended.set()
            self._erase()

    def interrupted(self) -> None:
        """As `end`, without waiting for a thread that may never go on."""
        self._ended.set()
        self._erase()

    def _erase(self) -> None:
        if self._shown:
            self._shown = False
            self._show("")

    def _show(self, text: str) -> None:
        with suppress(OSError):
            os.write(self._terminal.fileno(), (_ERASE_LINE + text).encode())

    def _watch(self) -> None:
        silent = 0.0
        while not self._ended.wait(_SILENT_SECONDS):
            silent += _SILENT_SECONDS
            with self._lock:
                if not self._ended.is_set():
                    self._shown = True
                    self._show(f"draftwood: working, no output yet ({silent:g} s)")


_status_line: _StatusLine | None = None


class _UnwritableError(OSError):
    """stdout or stderr cannot be written, as on a full disk."""


class _Output(TextIOWrapper):
    """stdout or stderr; ends the status line. A terminal that is not UTF-8 shows escapes.

    Once it could not be written, a flush does nothing: Python's own at the exit would complain again.
    """

    def __init__(self, stream: TextIOWrapper) -> None:
        super().__init__(
            stream.buffer,
            stream.encoding,
            errors="backslashreplace",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        self._unwritable = False

    def write(self, text: str) -> int:
        if _status_line is not None:
            _status_line.end()
        self._unwritable = False
        with self._named_errors():
            return super().write(text)

    def flush(self) -> None:
        if not self._unwritable:
            with self._named_errors():
                super().flush()

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._unwritable = True
            stream = "stdout" if self is sys.stdout else "stderr"
            raise _UnwritableError(f"{stream} cannot be written: {error.strerror}") from error


def _watch_silence() -> None:
    """Says on stderr that the command runs, until it writes something itself."""
    global _status_line
    if isinstance(sys.stderr, TextIOWrapper) and sys.stderr.isatty():
        _status_line = _StatusLine(sys.stderr)
        atexit.register(_status_line.end)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:  # its descriptor was closed
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # as long as the process runs
        elif mode == "w" and isinstance(stream, TextIOWrapper):
            setattr(sys, name, _Output(stream))


if __name__ == "__main__":
    main()
