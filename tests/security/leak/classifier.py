"""Asks the prompts again and again, and keeps what the wire showed of each answer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from draftwood_benchmarks.closed_loop import OWN_CONNECTION, Text
from draftwood_client import NO_RETRY, AsyncClient, GenerateOptions, TlsConfig


@dataclass(slots=True)
class Seen:
    """An answer as the wire and its client saw it; times are of `time.perf_counter`.

    Attributes:
        prompt: its number.
        first_at, last_at: arrival of the first and of the last delta with tokens.
        ended_at: of the whole answer.
    """

    prompt: int
    repetition: int
    sent_at: float = 0.0
    first_at: float = 0.0
    last_at: float = 0.0
    ended_at: float = 0.0
    tokens: int = 0
    records: list[Record] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.records)


async def ask_all(
    target: str, certificate: bytes, prompts: Sequence[Text], clients: int, repetitions: int, options: GenerateOptions
) -> list[Seen]:
    """Asks each prompt `repetitions` times, in random order; each client waits for its answer before it asks again.

    Raises:
        draftwood_client.DraftwoodError: a request failed.
    """
    order = [Seen(prompt, repetition) for repetition in range(repetitions) for prompt in range(len(prompts))]
    random.Random(0).shuffle(order)
    left = iter(order)

    async def work() -> None:
        async with (
            eavesdropped(target) as (address, wire),
            AsyncClient(address, tls=TlsConfig(certificate), retry=NO_RETRY, channel_options=OWN_CONNECTION) as client,
        ):
            await client.model_info()  # the connection is established
            for seen in left:
                await _ask(client, wire, prompts[seen.prompt], options, seen)

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(work())
    return order


async def _ask(client: AsyncClient, wire: RecordReader, prompt: Text, options: GenerateOptions, seen: Seen) -> None:
    before = len(wire.records)
    seen.sent_at = time.perf_counter()
    async with client.stream(prompt, **options) as stream:
        async for delta in stream:
            seen.last_at = time.perf_counter()
            seen.first_at = seen.first_at or seen.last_at
            seen.tokens += len(delta.token_ids)
    seen.ended_at = time.perf_counter()
    seen.records = wire.records[before:]


Record: TypeAlias = tuple[float, int]
"""(time of `time.perf_counter`, bytes) of a TLS record that the server sent."""

_HEADER = 5
"""Bytes of the clear header of a TLS record: type, version (2), length (2)."""
_CONTROL = 39
"""Bytes of the largest record that holds no message but an answer to a ping (TLS 22, HTTP/2 17). Clients ping when they
like, so such records would only move the others."""
_CHUNK = 65_536


@dataclass(slots=True)
class RecordReader:
    """Cuts the bytes of one direction of a connection into TLS records.

    Attributes:
        records: those that have arrived whole, with their headers; without HTTP/2's small control frames.
    """

    records: list[Record] = field(default_factory=list)
    _unread: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes, now: float) -> None:
        self._unread += data
        while len(self._unread) >= _HEADER:
            size = _HEADER + int.from_bytes(self._unread[3:_HEADER])
            if len(self._unread) < size:
                return
            del self._unread[:size]
            if size > _CONTROL:
                self.records.append((now, size))


@asynccontextmanager
async def eavesdropped(target: str) -> AsyncIterator[tuple[str, RecordReader]]:
    """A local address that leads to `target`, and what is seen there. For one connection."""
    host, _, port = target.rpartition(":")
    seen = RecordReader()
    relays: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(host, int(port))
        for relayed in (_relay(reader, server_writer, None), _relay(server_reader, writer, seen)):
            relays.add(asyncio.create_task(relayed))

    proxy = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"localhost:{proxy.sockets[0].getsockname()[1]}", seen
    finally:
        proxy.close()
        for relay in relays:
            relay.cancel()
        await asyncio.gather(*relays, return_exceptions=True)


async def _relay(source: asyncio.StreamReader, sink: asyncio.StreamWriter, seen: RecordReader | None) -> None:
    try:
        while data := await source.read(_CHUNK):
            if seen is not None:
                seen.feed(data, time.perf_counter())
            sink.write(data)
            await sink.drain()
    finally:
        sink.close()


Features: TypeAlias = NDArray[np.float64]

_FIRST, _LAST = 48, 12
"""Records at the beginning and at the end of an answer whose sizes and times are features of their own."""
_BIN, _BINS = 0.02, 60
"""Seconds of a time bin, and bins, whose bytes are features."""
_FOLDS = 3
"""Of the cross-validation that chooses a classifier, within the half to train with."""


@dataclass(frozen=True, slots=True)
class Guessed:
    """How often the prompt was guessed.

    Attributes:
        classifier: the one that cross-validation within the half to train with chose.
        expected: its accuracy there.
        accuracy: share of the other half whose prompt it named.
        low, high: its 95% interval (Wilson).
    """

    classifier: str
    expected: float
    accuracy: float
    low: float
    high: float


def size_features(records: Sequence[Record], sent_at: float) -> Features:
    """Of the sizes alone: of the first and last records, their number, sum and spread."""
    sizes = np.array([size for _, size in records], np.float64)
    return np.concatenate([_ends(sizes), [sizes.size, sizes.sum(), sizes.max(), sizes.std(), np.median(sizes)]])


def time_features(records: Sequence[Record], sent_at: float) -> Features:
    """Of the times: between the first and last records, their number, the whole duration, and records in each bin."""
    times = np.array([time - sent_at for time, _ in records], np.float64)
    gaps, counts = np.diff(times, prepend=0.0), _in_bins(times, np.ones(times.size))
    return np.concatenate([_ends(gaps), counts, [times.size, times[-1], np.median(gaps), gaps.max(), gaps.std()]])


def all_features(records: Sequence[Record], sent_at: float) -> Features:
    """Of sizes and times, and the bytes in each bin."""
    times, sizes = np.array(records, np.float64).T
    of_bins = _in_bins(times - sent_at, sizes)
    return np.concatenate([size_features(records, sent_at), time_features(records, sent_at), of_bins])


def _ends(values: Features) -> Features:
    """The first values and the last ones, zeros if there are fewer."""
    parts = (values, _FIRST), (values[::-1], _LAST)
    return np.concatenate([np.pad(part[:count], (0, max(0, count - part.size))) for part, count in parts])


def _in_bins(times: Features, weights: Features) -> Features:
    found: Features = np.zeros(_BINS)
    np.add.at(found, np.minimum(times / _BIN, _BINS - 1).astype(int), weights)
    return found


def guess(known: Features, known_prompts: Sequence[int], others: Features, prompts: Sequence[int]) -> Guessed:
    """Trains with the answers to known prompts, and guesses the prompts of others.

    Args:
        known, others: float64[answer, feature].
    """
    from scipy.stats import binomtest
    from sklearn.model_selection import StratifiedKFold, cross_val_score

    folds = StratifiedKFold(_FOLDS, shuffle=True, random_state=0)
    candidates = _candidates()
    scores = {name: cross_val_score(one, known, known_prompts, cv=folds).mean() for name, one in candidates.items()}
    name = max(scores, key=lambda name: scores[name])
    named = candidates[name].fit(known, known_prompts).predict(others)
    right = int((named == np.asarray(prompts)).sum())
    interval = binomtest(right, len(prompts)).proportion_ci(method="wilson")
    return Guessed(name, float(scores[name]), right / len(prompts), float(interval.low), float(interval.high))


def _candidates() -> dict[str, Any]:
    from sklearn.ensemble import ExtraTreesClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return {
        "extra trees": ExtraTreesClassifier(300, random_state=0),
        "logistic regression": make_pipeline(StandardScaler(), LogisticRegression(max_iter=500)),
        "nearest neighbour": make_pipeline(StandardScaler(), KNeighborsClassifier(1)),
    }
