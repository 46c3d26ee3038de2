"""The plug-in's records of its drafts, read from the socket that vLLM's processes connect to."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog

from draftwood_memory.counters import MemoryCounters
from draftwood_model_runner.sequence import Sequence
from draftwood_vllm.service_link import HOST_VARIABLE, SOCKET_VARIABLE

_log = structlog.get_logger(__name__)

_MESSAGE_BYTES = 1 << 17
_BACKLOG = 256
"""Processes of vLLM on this machine, and more."""


class DraftRecords:
    """The records of live requests. For the engine's thread, except `memory` and `healthy`.

    Attributes:
        memory, healthy: counters of the worker's memories, and whether its store answers; None until they are known.
    """

    def __init__(self, listening: socket.socket) -> None:
        listening.setblocking(False)
        self.memory: MemoryCounters | None = None
        self.healthy = True
        self._listening = listening
        self._connections: list[socket.socket] = []
        self._latest: dict[str, list[Any]] = {}
        self._drafted: dict[str, dict[int, int]] = {}

    def read(self, live: Container[str]) -> None:
        """Takes what has come of live requests. Does not wait."""
        try:
            while True:
                self._connections.append(self._listening.accept()[0])
                self._connections[-1].setblocking(False)
        except OSError:
            pass
        for connection in [*self._connections]:
            try:
                while data := connection.recv(_MESSAGE_BYTES):
                    self._take(json.loads(data), live)
            except BlockingIOError:
                continue
            except OSError:
                pass
            self._connections.remove(connection)
            connection.close()

    def drafted(self, request_id: str, sequence: Sequence) -> int:
        """Draft tokens of the step that ends, before its output is added to the sequence; notes in the statistics of
        the sequence what else is known by now."""
        latest = self._latest.get(request_id)
        if latest is None:
            return 0
        stats = sequence.stats
        stats.proposed_tokens, stats.draft_seconds, stats.suspensions, stats.drafting_disabled_reason = latest
        # What was drafted for the step after it is there as well.
        return self._drafted[request_id].pop(len(sequence.output), 0)

    def end(self, request_id: str) -> None:
        """Forgets a request."""
        self._latest.pop(request_id, None)
        self._drafted.pop(request_id, None)

    def close(self) -> None:
        """Lets processes of vLLM that are left end."""
        for connection in (self._listening, *self._connections):
            connection.close()

    def _take(self, message: dict[str, Any], live: Container[str]) -> None:
        for request_id, written, drafted, *latest in message.get("drafts", ()):
            if request_id in live:
                self._latest[request_id] = latest
                self._drafted.setdefault(request_id, {})[written] = drafted
        if "memory" in message:
            self.memory, self.healthy = MemoryCounters(**message["memory"]), bool(message["healthy"])


@contextmanager
def draft_records() -> Iterator[DraftRecords]:
    """Records of the processes that are started within the context: their environment names the socket."""
    with tempfile.TemporaryDirectory(prefix="draftwood-engine-") as folder:
        path = Path(folder, "socket")
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listening.bind(str(path))
        listening.listen(_BACKLOG)
        os.environ |= {SOCKET_VARIABLE: str(path), HOST_VARIABLE: str(os.getpid())}
        records = DraftRecords(listening)
        try:
            yield records
        finally:
            records.close()
