"""The link to Draftwood's service, where that runs vLLM as its engine: a Unix socket in a folder of its own.

Imports nothing but the standard library, as `proposer` does.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftwood_memory.engines.drafts import DraftListener
    from draftwood_memory.engines.session import Session
    from draftwood_memory.memory import Memory

_log = logging.getLogger("draftwood")

SOCKET_VARIABLE = "DRAFTWOOD_ENGINE_SOCKET"
"""Path of the socket. Where it is set, the service decides how each request is drafted, and callers nothing."""
ELSEWHERE = "elsewhere"
"""In the place of a path, on the nodes without the service."""
HOST_VARIABLE = "DRAFTWOOD_ENGINE_HOST"
"""Id of the process at the other end, which vLLM's processes end with."""
_REPORT_SECONDS = 1.0
_ENDING_SECONDS = 10.0
"""For a process to end by itself once the other end is gone."""
_ROWS = 256
"""Requests of a message: with 100 bytes each, far below what a socket's buffer takes."""


class Recorder:
    """Reports to the service what was drafted for each request, and the counters of the memories. A context manager;
    `with` returns the listener that `EngineDrafts` calls.

    Messages are JSON. After each step with drafts, `{"drafts": [[request id, tokens that it has written, draft tokens
    of the coming step, proposed tokens so far, seconds in the drafter so far, suspensions so far, why drafting was
    switched off], ...]}`; once a second, `{"memory": counters, "healthy": whether the store answers}`. A message for
    which there is no room is lost, so that no step waits.
    """

    def __init__(self, path: str, memory: Memory) -> None:
        self._memory = memory
        self._socket = _connected(path)
        self._socket.setblocking(False)
        self._closed = threading.Event()
        self._reporting = threading.Thread(target=self._report, name="draftwood-report", daemon=True)

    def __enter__(self) -> DraftListener:
        self._reporting.start()
        return self._on_drafts

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed.set()
        self._reporting.join(_REPORT_SECONDS)
        self._socket.close()

    def _on_drafts(self, sessions: SequenceOf[Session]) -> None:
        """Of the requests of a step that ended, and what is drafted for the next one."""
        rows = []
        for session in sessions:
            stats, drafted = session.stats, session.drafted
            if drafted or (stats.drafting_disabled_reason and not session.disabled_reported):
                session.disabled_reported = bool(stats.drafting_disabled_reason)
                rows.append(
                    [
                        session.request.request_id,
                        session.seen - int(session.request.prompt.shape[0]),
                        drafted,
                        stats.proposed_tokens,
                        round(stats.draft_seconds, 7),
                        stats.suspensions,
                        stats.drafting_disabled_reason,
                    ]
                )
        for begin in range(0, len(rows), _ROWS):
            self._send({"drafts": rows[begin : begin + _ROWS]})

    def _report(self) -> None:
        while not self._closed.wait(_REPORT_SECONDS):
            self._send({"memory": asdict(self._memory.counters()), "healthy": self._memory.healthy})

    def _send(self, message: Mapping[str, Any]) -> None:
        with suppress(OSError):
            self._socket.send(json.dumps(message).encode())


def end_with_service(environ: Mapping[str, str]) -> None:
    """Ends this process of vLLM when the service's process that started vLLM is gone, however that ended.

    Does nothing where the service does not run vLLM, or runs on another machine.
    """
    path = environ.get(SOCKET_VARIABLE)
    if not path or not os.path.exists(path) or environ.get(HOST_VARIABLE) == str(os.getpid()):
        return
    connection = _connected(path)

    def watch() -> None:
        with suppress(OSError):
            while connection.recv(64):
                pass
        _log.info("the service has ended, and so does this process of vLLM")
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(_ENDING_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="draftwood-service", daemon=True).start()


def _connected(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(path)
    return connection
