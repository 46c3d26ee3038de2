"""Which requests have slots, and which end so that a new one gets slots when all are taken. For the event loop only."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable

from draftwood_service.engine.stream import Stream
from draftwood_service.errors import QueueFullError, ReaderStalledError, ShuttingDownError

_MIN_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.1, 10.0
"""The delay that a refused client is advised is the mean duration of requests over the number that run together, within
these bounds. It is an estimate."""
_SMOOTHING = 0.1
"""The weight of a request in the mean duration, an exponential average."""


class Admission:
    """The slots of an engine.

    A tenant may hold all of them. When they are taken and another one comes that holds less for its weight, requests of
    the first end instead, the newest first: those that are paused, and then those that have not begun.

    Attributes:
        live: requests that were admitted and have not ended.

    Args:
        max_running: sequences that the engine decodes together.
        max_waiting: further sequences that are admitted.
        weight_of: the share of a tenant in these, relative to others.
    """

    def __init__(self, max_running: int, max_waiting: int, weight_of: Callable[[str], float]) -> None:
        self.live: set[Stream] = set()
        self._max_running = max_running
        self._max_live = max_running + max_waiting
        self._weight_of = weight_of
        self._request_seconds = 1.0

    @property
    def taken(self) -> int:
        """Slots of live requests."""
        return sum(stream.slots for stream in self.live)

    def enter(self, stream: Stream) -> None:
        """Makes a request live. If others have to end for it, they do when it takes its slots.

        Raises:
            QueueFullError: it has to be refused itself.
        """
        stream.has_slots = not self._to_refuse(self.live, stream)
        self.live.add(stream)

    def take_slots(self, stream: Stream) -> None:
        """Gives a live request its slots, which others lose if too few are free. Raises QueueFullError."""
        if not stream.has_slots:
            for waiting in self._to_refuse([waiting for waiting in self.live if waiting.has_slots], stream):
                waiting.fail(ReaderStalledError(waiting.unread_for()) if waiting.paused else self._full())
            stream.has_slots = True

    def leave(self, stream: Stream) -> None:
        """A request has ended."""
        self.live.discard(stream)
        if stream.id is not None:
            self._request_seconds += _SMOOTHING * (time.perf_counter() - stream.admitted_at - self._request_seconds)

    def drain(self, seconds: float) -> None:
        """Refuses requests that wait, the newest first, but as many as will end within `seconds` at the rate at which
        requests ended so far: clients do not repeat a request that was admitted (`Started` has been sent).

        The rate is what Little's law says: the live requests over the mean duration of one, its time in the queue
        included.
        """
        ending = int(seconds * self.taken / self._request_seconds)
        left = max(self._max_running, ending) - sum(stream.slots for stream in self.live if stream.begun)
        for stream in sorted(self.live, key=lambda stream: stream.admitted_at):
            if not stream.begun:
                left -= stream.slots
                if left < 0:
                    stream.fail(ShuttingDownError())

    def _to_refuse(self, holding: Iterable[Stream], coming: Stream) -> list[Stream]:
        """Requests to end so that the coming one gets its slots. Raises QueueFullError.

        They are of tenants that then still hold at least as much for their weight, and paused or not begun.
        """
        holding = [stream for stream in holding if not stream.failed]
        held = Counter[str]()
        for stream in holding:
            held[stream.tenant] += stream.slots
        missing = held.total() + coming.slots - self._max_live
        share = (held[coming.tenant] + coming.slots) / self._weight_of(coming.tenant)
        refused: list[Stream] = []
        for stream in sorted(holding, key=lambda stream: (stream.paused, stream.admitted_at), reverse=True):
            if missing <= 0:
                break
            left = held[stream.tenant] - stream.slots
            needed = stream.begun and not stream.paused
            if needed or stream.tenant == coming.tenant or left / self._weight_of(stream.tenant) < share:
                continue
            held[stream.tenant] = left
            refused.append(stream)
            missing -= stream.slots
        if missing > 0:
            raise self._full()
        return refused

    def _full(self) -> QueueFullError:
        estimate = self._request_seconds / self._max_running
        return QueueFullError(self._max_live, min(max(estimate, _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS))
