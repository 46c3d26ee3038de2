"""Where servers keep the counts of experiments, so that each can read those of all: in the process, or in Redis.

All keys of an experiment have one hash tag: `dw:{counts:NAME:}:sequences` and `:values` (hashes by `Target.field`),
`:history` (a hash by definition) and `:deleted` (the definition that was deleted last, for an hour). Snapshots are a
header, and the counts compressed: half of the numbers are small and whole, many are 0.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import quote, unquote

import numpy as np

from draftwood_memory.errors import CorruptValueError, NewerFormatError
from draftwood_memory.store.redis_client import RedisClient, Script
from draftwood_tenants.experiments.counts import FIELDS, Counts, Origin, Snapshot, column
from draftwood_tenants.resources.redis import ResourceCipher

VERSION = 3
_STORED_FIELDS = {1: len(FIELDS) + 2, 2: len(FIELDS) + 3, VERSION: len(FIELDS)}
"""Before 3 there were three covariates before `timed`; 1 had no `timed`: all of its answers have a TTFT."""
_HEADER = struct.Struct("<2sBQI")
_MAGIC = b"dx"
_TIMED = column("timed")
_LEVEL = 1
"""Of zlib. Two arms take 72 KB in RAM and 33 KB encoded, in 1 ms; level 6 makes 30 KB of it, in 5 ms."""
_KIND = "counts"
_LEASE = "dw:{counts}:lease"
_DELETED_SECONDS = 3600
_PAGE = 64
"""Snapshots that are read at once, 3 MB with two arms."""
# ARGV: definition field sequence value
_WRITE = """
local sequences, values, deleted = KEYS[1], KEYS[2], KEYS[3]
if redis.call('GET', deleted) == ARGV[1] then return 0 end
local known = redis.call('HGET', sequences, ARGV[2])
if known and tonumber(known) >= tonumber(ARGV[3]) then return 0 end
redis.call('HSET', sequences, ARGV[2], ARGV[3])
redis.call('HSET', values, ARGV[2], ARGV[4])
return 1
"""
# ARGV: definition page, then field sequence of what is known. Returns field sequence value of what is newer.
_READ = """
local sequences, values = KEYS[1], KEYS[2]
local known, prefix, given = {}, ARGV[1] .. '/', {}
for i = 3, #ARGV, 2 do known[ARGV[i]] = tonumber(ARGV[i + 1]) end
local all = redis.call('HGETALL', sequences)
for i = 1, #all, 2 do
  local field = all[i]
  if string.sub(field, 1, #prefix) == prefix and tonumber(all[i + 1]) > (known[field] or -1) then
    given[#given + 1] = field
    given[#given + 1] = all[i + 1]
    given[#given + 1] = redis.call('HGET', values, field)
    if #given == 3 * tonumber(ARGV[2]) then break end
  end
end
return given
"""
# ARGV: definition value
_WRITE_HISTORY = """
if redis.call('GET', KEYS[2]) == ARGV[1] then return 0 end
return redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
"""
# ARGV: definition seconds
_DELETE = """
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
return redis.call('SET', KEYS[4], ARGV[1], 'EX', ARGV[2])
"""
# ARGV: process milliseconds
_LEAD = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""


@dataclass(frozen=True, slots=True)
class Target:
    """The counts of an experiment.

    Attributes:
        name: of the experiment.
        definition: identifies all that is frozen while it runs, hexadecimal digits: an experiment of the same name
            that is made later, or of a file that was changed, has other counts.
    """

    name: str
    definition: str

    def field(self, origin: Origin) -> str:
        """Of the counts of a process."""
        return f"{self.definition}/{quote(origin.replica, safe='')}/{quote(origin.boot, safe='')}"


def origin_of(field: str) -> Origin:
    """The process of a `Target.field`."""
    _, replica, boot = field.split("/")
    return Origin(unquote(replica), unquote(boot))


@dataclass(frozen=True, slots=True)
class EncodedSnapshot:
    """The newest snapshot of a process, encoded."""

    origin: Origin
    sequence: int
    data: bytes


class CountStore(Protocol):
    """Counts by experiment and process, the newest of each. All methods raise `MemoryStoreError`."""

    async def write(self, target: Target, snapshot: EncodedSnapshot) -> None:
        """Keeps a snapshot. Does nothing if there is one with this sequence number or a larger one, or if the
        experiment was deleted.
        """

    async def read(self, target: Target, known: Mapping[Origin, int]) -> list[EncodedSnapshot]:
        """The snapshots that are newer than those of these sequence numbers."""

    async def write_history(self, target: Target, data: bytes) -> None:
        """Replaces the history: the interim looks at the experiment. Does nothing if it was deleted."""

    async def read_history(self, target: Target) -> bytes:
        """The history, see `write_history`; empty if there is none."""

    async def delete(self, target: Target) -> None:
        """Deletes all of an experiment's name. What a process that has not heard of it writes later is refused."""

    async def acquire_lease(self, process: str, seconds: float) -> bool:
        """Whether this process holds the lease, for so many seconds: one looks at the experiments for all."""


def encode(snapshot: Snapshot) -> bytes:
    """The snapshot without its origin."""
    counts = snapshot.counts
    values = np.concatenate([counts.sums.ravel(), counts.latencies.ravel()]).astype("<f8", copy=False)
    planes = values.view(np.uint8).reshape(-1, 8).T.tobytes()  # equal bytes of neighbours side by side
    body = zlib.compress(planes, _LEVEL)
    return _HEADER.pack(_MAGIC, VERSION, snapshot.sequence, zlib.crc32(planes)) + body


def decode(origin: Origin, arms: int, data: bytes) -> Snapshot:
    """The snapshot of a process.

    Raises:
        NewerFormatError: a newer version of this program wrote it.
        CorruptValueError: it cannot be read, or is of another number of arms.
    """
    if len(data) < _HEADER.size:
        raise CorruptValueError(f"counts: {len(data)} bytes are too few")
    magic, version, sequence, checksum = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise CorruptValueError("counts: the value is something else")
    if version > VERSION:
        raise NewerFormatError(f"counts: format {version}; this version reads up to {VERSION}")
    counts = Counts.zero(arms)
    sums = np.zeros((*counts.sums.shape[:-1], _STORED_FIELDS.get(version, 0)))
    size = sums.nbytes + counts.latencies.nbytes
    reader = zlib.decompressobj()
    try:
        planes = reader.decompress(data[_HEADER.size :], size)
    except zlib.error as error:
        raise CorruptValueError(f"counts: {error}") from None
    if len(planes) != size or not reader.eof or zlib.crc32(planes) != checksum:
        raise CorruptValueError(f"counts: not those of {arms} arms, or damaged")
    values = np.frombuffer(planes, np.uint8).reshape(8, -1).T.copy().view("<f8").ravel()
    sums[...] = values[: sums.size].reshape(sums.shape)
    counts.sums[..., :_TIMED] = sums[..., :_TIMED]
    counts.sums[..., _TIMED] = sums[..., column("answered") if version == 1 else -1]
    counts.latencies[...] = values[sums.size :].reshape(counts.latencies.shape)
    return Snapshot(origin, sequence, counts)


class InProcessCounts:
    """A `CountStore` without a server."""

    def __init__(self) -> None:
        self._counts: dict[Target, dict[Origin, EncodedSnapshot]] = {}
        self._history: dict[Target, bytes] = {}
        self._deleted: dict[str, str] = {}

    async def write(self, target: Target, snapshot: EncodedSnapshot) -> None:
        of_target = self._counts.setdefault(target, {})
        known = of_target.get(snapshot.origin)
        if (known is None or snapshot.sequence > known.sequence) and not self._is_deleted(target):
            of_target[snapshot.origin] = snapshot

    async def read(self, target: Target, known: Mapping[Origin, int]) -> list[EncodedSnapshot]:
        stored = self._counts.get(target, {}).values()
        return [snapshot for snapshot in stored if snapshot.sequence > known.get(snapshot.origin, -1)]

    async def write_history(self, target: Target, data: bytes) -> None:
        if not self._is_deleted(target):
            self._history[target] = data

    async def read_history(self, target: Target) -> bytes:
        return self._history.get(target, b"")

    async def delete(self, target: Target) -> None:
        self._deleted[target.name] = target.definition
        for kept in [count for count in self._counts if count.name == target.name]:
            del self._counts[kept]
        for one in [one for one in self._history if one.name == target.name]:
            del self._history[one]

    async def acquire_lease(self, process: str, seconds: float) -> bool:
        return True

    def _is_deleted(self, target: Target) -> bool:
        return self._deleted.get(target.name) == target.definition


class RedisCounts:
    """A `CountStore` on a server, a group behind Sentinel or a cluster.

    Args:
        client: is not closed here.
    """

    def __init__(self, client: RedisClient, cipher: ResourceCipher) -> None:
        self._client = client
        self._cipher = cipher

    async def write(self, target: Target, snapshot: EncodedSnapshot) -> None:
        sequences, values, _, deleted = self._keys(target)
        field = target.field(snapshot.origin)
        encrypted = self._cipher.encrypt(_KIND, target.name, field.encode() + b"\x00" + snapshot.data)
        arguments: list[str | int | bytes] = [target.definition, field, snapshot.sequence, encrypted]
        await self._client.run(Script(_WRITE, [sequences, values, deleted], arguments))

    async def read(self, target: Target, known: Mapping[Origin, int]) -> list[EncodedSnapshot]:
        sequences, values, *_ = self._keys(target)
        seen = {target.field(origin): sequence for origin, sequence in known.items()}
        snapshots: list[EncodedSnapshot] = []
        while True:
            pairs: list[str | int | bytes] = [part for pair in seen.items() for part in pair]
            answer = await self._client.run(Script(_READ, [sequences, values], [target.definition, _PAGE, *pairs]))
            for field_bytes, sequence, value in zip(answer[::3], answer[1::3], answer[2::3], strict=True):
                field = field_bytes.decode()
                seen[field] = int(sequence)
                snapshots.append(
                    EncodedSnapshot(origin_of(field), int(sequence), self._decrypted(target, field, value))
                )
            if len(answer) < 3 * _PAGE:
                return snapshots

    async def write_history(self, target: Target, data: bytes) -> None:
        _, _, history, deleted = self._keys(target)
        encrypted = self._cipher.encrypt(_KIND, target.name, target.definition.encode() + b"\x00" + data)
        await self._client.run(Script(_WRITE_HISTORY, [history, deleted], [target.definition, encrypted]))

    async def read_history(self, target: Target) -> bytes:
        value = await self._client.command("HGET", self._keys(target)[2], target.definition)
        return b"" if value is None else self._decrypted(target, target.definition, value)

    async def delete(self, target: Target) -> None:
        await self._client.run(Script(_DELETE, self._keys(target), [target.definition, _DELETED_SECONDS]))

    async def acquire_lease(self, process: str, seconds: float) -> bool:
        return bool(await self._client.run(Script(_LEAD, [_LEASE], [process, round(1000 * seconds)])))

    def _keys(self, target: Target) -> list[str]:
        tag = self._cipher.key(_KIND, target.name)
        return [f"dw:{{{tag}}}:{suffix}" for suffix in ("sequences", "values", "history", "deleted")]

    def _decrypted(self, target: Target, field: str, value: bytes) -> bytes:
        """The data; empty, which no reader accepts, if it cannot be read."""
        try:
            _, _, joined = self._cipher.decrypt(self._cipher.key(_KIND, target.name), value)
        except CorruptValueError:
            return b""
        bound, _, data = joined.partition(b"\x00")
        return data if bound == field.encode() else b""
