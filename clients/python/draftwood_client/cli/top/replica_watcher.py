"""Follows several servers, each on a thread of its own, and tries again while one is away."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import grpc

from draftwood_client.admin.client import AdminClient
from draftwood_client.cli.options import error_line
from draftwood_client.cli.top.replica import Replica
from draftwood_client.cli.top.snapshot import Snapshot, snapshot
from draftwood_client.errors import DraftwoodError, StatusError

_RETRY_SECONDS = 1.0
"""Between two attempts to reach a server that is away."""
_JOIN_SECONDS = 2.0
"""For a thread to end when its call has been cancelled."""
_REFUSED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
}
"""Answers that stay the same if the call is made again."""


class ReplicaWatcher:
    """Context manager: the servers are followed inside of it.

    Args:
        open_client: to a target.
        interval: seconds between two samples.
    """

    def __init__(
        self, targets: Sequence[str], open_client: Callable[[str], AdminClient], interval: float = 1.0
    ) -> None:
        self._interval = interval
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._first_error: StatusError | None = None
        self._replicas = [Replica(target, interval) for target in targets]
        self._clients = [open_client(target) for target in targets]
        pairs = zip(self._clients, self._replicas, strict=True)
        self._threads = [threading.Thread(target=self._follow, args=pair, daemon=True) for pair in pairs]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ending.set()
        for client in self._clients:
            client.close()
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)

    def snapshot(self) -> Snapshot:
        """The latest figures.

        Raises:
            StatusError: every server refuses the caller.
        """
        with self._lock:
            if self._first_error is not None and all(one.refused for one in self._replicas):
                raise self._first_error
            return snapshot([one.view() for one in self._replicas])

    def wait_for_rates(self, seconds: float) -> None:
        """Waits until each server has sent two samples, or could not be reached; at most so long.

        Raises:
            StatusError: no server sends samples.
        """
        waited = 0.0
        while waited < seconds and not self._ending.wait(0.05):
            waited += 0.05
            with self._lock:
                if all(one.has_rates for one in self._replicas):
                    break
        with self._lock:
            if self._first_error is not None and all(one.view().latest is None for one in self._replicas):
                raise self._first_error

    def _follow(self, client: AdminClient, replica: Replica) -> None:
        while not self._ending.is_set():
            try:
                for status in client.watch_status(self._interval):
                    with self._lock:
                        replica.add_sample(status)
                # The server lets no call last for ever.
            except StatusError as error:
                self._away(replica, error_line(error), error)
            except DraftwoodError:
                return  # the client was closed
            self._ending.wait(_RETRY_SECONDS)

    def _away(self, replica: Replica, problem: str, error: StatusError | None = None) -> None:
        if self._ending.is_set():
            return
        with self._lock:
            replica.fail(problem, error is not None and error.code in _REFUSED)
            self._first_error = self._first_error or error
