"""Servers that are followed, each on a thread: the samples of each, and what it did in the latest seconds."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc
from google.protobuf.message import Message

from draftwood.admin.v1.status_pb2 import ServerStatus
from draftwood_client.admin import AdminClient
from draftwood_client.cli.options import error_line
from draftwood_client.convert import plain, seconds, word
from draftwood_client.errors import DraftwoodError, StatusError

WINDOW_SECONDS = 5.0
"""Rates are means over so long: steady to the eye, and soon at a new value."""
AWAY_SECONDS = 5.0
"""Without a sample for so long, and for three intervals, a server is shown as away."""
STALLED_SECONDS = 10.0
"""Without new figures of its engine for so long, a server is shown as stalled: a step takes less."""
CONNECTING = "connecting"

Counts = dict[str, float]
"""The numbers of a thing by the names of their fields in the protocol; durations are seconds."""
Key = tuple[str, ...]
"""A thing: ("load",), ("store",), ("tenant", name), ("drafting", strategy, arm) or ("source", name)."""


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One server at one moment.

    Attributes:
        state: as the server names it, or "stalled", "away" or "connecting".
        problem: why no sample comes now; "" while they do.
        latest: None while the server is away.
        now: what each thing has now; of "load" only for callers who may see it.
        rates: what each thing counted a second; empty before two samples, or if it stalled.
    """

    target: str
    state: str
    problem: str
    latest: ServerStatus | None
    now: dict[Key, Counts]
    rates: dict[Key, Counts]


class Replica:
    """The samples of one server. Not thread-safe.

    Attributes:
        problem: why no sample comes now; "" while they do.
        refused: the caller may not watch it, so that trying again is of no use.
    """

    def __init__(self, target: str, interval: float) -> None:
        self.target = target
        self.problem = CONNECTING
        self.refused = False
        self._patience = max(AWAY_SECONDS, 3 * interval)
        self._arrived_at = 0.0
        self._reported_at = 0.0
        self._samples: deque[ServerStatus] = deque()

    def add_sample(self, status: ServerStatus) -> None:
        """Adds a sample. The ones before are forgotten if the server has been restarted since."""
        self.problem, self.refused = "", False
        self._arrived_at = time.monotonic()
        samples, uptime = self._samples, seconds(status.uptime)
        if samples and uptime < seconds(samples[-1].uptime):
            samples.clear()
        if samples and uptime == seconds(samples[-1].uptime):
            samples[-1] = status  # no new figures, but perhaps another state
            return
        self._reported_at = self._arrived_at
        samples.append(status)
        while len(samples) > 2 and uptime - seconds(samples[1].uptime) >= WINDOW_SECONDS:
            samples.popleft()

    def fail(self, problem: str, refused: bool = False) -> None:
        """No sample comes any more; those there were are no longer shown."""
        self.problem, self.refused = problem, refused
        self._samples.clear()

    @property
    def has_rates(self) -> bool:
        """There are two samples of different moments, or there will be none."""
        return len(self._samples) > 1 or self.problem not in ("", CONNECTING)

    def view(self) -> ReplicaView:
        """All that is shown of the server, as of one moment."""
        now = time.monotonic()
        if not self._samples or now - self._arrived_at > self._patience:
            state = CONNECTING if self.problem == CONNECTING else "away"
            return ReplicaView(self.target, state, self.problem or "it does not answer", None, {}, {})
        latest = self._samples[-1]
        state = word(latest, "state")
        stalled = now - self._reported_at > STALLED_SECONDS
        if stalled and state == "serving":
            state = "stalled"
        rates = {} if stalled else self._rates()
        return ReplicaView(self.target, state, self.problem, latest, _counts(latest), rates)

    def _rates(self) -> dict[Key, Counts]:
        if len(self._samples) < 2:
            return {}
        first, last = self._samples[0], self._samples[-1]
        passed = seconds(last.uptime) - seconds(first.uptime)
        before = _counts(first)
        return {
            key: {name: max(value - before[key][name], 0.0) / passed for name, value in counts.items()}
            for key, counts in _counts(last).items()
            if key in before
        }


def _counts(status: ServerStatus) -> dict[Key, Counts]:
    things: dict[Key, Counts] = {("tenant", tenant.tenant): _numbers(tenant) for tenant in status.tenants}
    if status.HasField("load"):
        load = status.load
        things |= {("load",): _numbers(load) | _numbers(load.audits), ("store",): _numbers(load.store)}
        things |= {("drafting", drafts.strategy, drafts.arm): _numbers(drafts) for drafts in load.drafting}
        things |= {("source", source.source): _numbers(source) for source in load.sources}
    return things


def _numbers(message: Message) -> Counts:
    return {name: value for name, value in plain(message).items() if isinstance(value, int | float)}


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

    def views(self) -> list[ReplicaView]:
        """The latest figures.

        Raises:
            StatusError: every server refuses the caller.
        """
        with self._lock:
            if self._first_error is not None and all(replica.refused for replica in self._replicas):
                raise self._first_error
            return [replica.view() for replica in self._replicas]

    def wait_for_rates(self, seconds: float) -> None:
        """Waits until each server has sent two samples, or could not be reached; at most so long.

        Raises:
            StatusError: no server sends samples.
        """
        waited = 0.0
        while waited < seconds and not self._ending.wait(0.05):
            waited += 0.05
            with self._lock:
                if all(replica.has_rates for replica in self._replicas):
                    break
        with self._lock:
            if self._first_error is not None and all(replica.view().latest is None for replica in self._replicas):
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
