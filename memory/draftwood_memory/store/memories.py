"""Memories in Redis or Valkey: a stream of entries for each, and a hash for each tenant.

A tenant's hash has the fields: `v`, the highest `SCHEMA` that wrote to it; `g`, the tenant's epoch, and `g:ARM`, that
of an arm; `n:FINGERPRINT:ARM`, a memory's encoded name, and `t:FINGERPRINT:ARM`, its tokens.

The epoch of a memory is the later one of its tenant's and its arm's: the time of the last purge, in microseconds of the
store's clock, or 0. It is part of the stream's key, so nothing is read that was written in an earlier epoch. Whatever
writes compares its epoch with the tenant's in a script, together with the write, so nothing is written either.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any

from draftwood_memory.errors import MemoryStoreError, NewerMemoryError, StoreRefusedError
from draftwood_memory.store.naming import (
    KINDS_KEY,
    SCHEMA,
    arm_part,
    fingerprint_of,
    memories_key,
    stream_key,
    stream_prefix,
    tenant_key,
    tenant_part,
)
from draftwood_memory.store.redis_client import Command, RedisClient, Script, eval_command, write_when_full
from draftwood_memory.store.stored import Append, Entry, MemoryMetadata, StoreClock, StoredMemory

_HASH_SECONDS = 30 * 24 * 3600
"""By how much a tenant's hash outlives its streams, so that no late entry is written. It has to outlast every outbox,
and every replica that has not heard of a purge."""
_MIN_ENTRY_BYTES = 64
"""Bounds a stream that is written by processes that have not loaded it: no entry is smaller."""
_METADATA = """
local function number(value) return tonumber(value or 0) end
local function metadata(arm) return redis.call('HMGET', KEYS[1], 'v', 'g', 'g:' .. arm) end
"""
"""Microseconds are whole numbers in Lua until the year 2255."""
_APPEND = (
    _METADATA
    + """
local schema, arm, epoch, field, name, tokens = unpack(ARGV)
local hash_expiry, expiry, begins, strategy, threshold = unpack(ARGV, 7, 11)
local version, tenants, arms = unpack(metadata(arm))
if number(version) > tonumber(schema) or math.max(number(tenants), number(arms)) > tonumber(epoch)
    or begins == '1' and redis.call('HEXISTS', KEYS[1], 'n:' .. field) == 1 then
  return {false, metadata(arm)}
end
local function expire(key, milliseconds)
  if milliseconds == '0' then redis.call('PERSIST', key) else redis.call('PEXPIRE', key, milliseconds) end
end
redis.call('HSET', KEYS[1], 'v', schema, 'n:' .. field, name)
if tokens ~= '' then redis.call('HSET', KEYS[1], 't:' .. field, tokens) end
expire(KEYS[1], hash_expiry)
if begins == '1' and redis.call('XLEN', KEYS[2]) > 0 then return {false, metadata(arm)} end
local id
for i = 12, #ARGV do id = redis.call('XADD', KEYS[2], strategy, '~', threshold, '*', 'e', ARGV[i]) end
expire(KEYS[2], expiry)
return {id, metadata(arm)}
"""
)
"""Writes entries unless the memory is in a later epoch, or of a newer version, or is to begin and has begun; of one
that has lost its hash alone, that is written. The hash comes first: where a right or the room is missing, no entry is
without its name."""
_PURGE = (
    _METADATA
    + """
local schema, arm, floor, streams = unpack(ARGV)
local hash, time, list = {}, redis.call('TIME'), redis.call('HGETALL', KEYS[1])
for i = 1, #list, 2 do hash[list[i]] = list[i + 1] end
if number(hash.v) > tonumber(schema) then return false end
local epoch = math.max(number(time[1]) * 1000000 + number(time[2]), tonumber(floor))
for name, value in pairs(hash) do
  if name == 'g' or string.sub(name, 1, 2) == 'g:' then epoch = math.max(epoch, number(value) + 1) end
end
redis.call('DEL', KEYS[2]) -- what needs no memory first: then a full server accepts the rest
redis.call('HSET', KEYS[1], 'v', schema, arm == '*' and 'g' or 'g:' .. arm, string.format('%.0f', epoch))
local purged = {}
for name in pairs(hash) do
  local fingerprint, of_arm = string.match(name, '^n:([^:]*):(.*)$')
  if fingerprint and (arm == '*' or arm == of_arm) then
    local field = fingerprint .. ':' .. of_arm
    local last = math.max(number(hash.g), number(hash['g:' .. of_arm]))
    redis.call('UNLINK', streams .. field .. ':' .. string.format('%.0f', last))
    redis.call('HDEL', KEYS[1], 't:' .. field)
    purged[#purged + 1] = field
    purged[#purged + 1] = number(hash['t:' .. field])
  end
end
return purged
"""
)
"""Raises an epoch and deletes the streams of earlier ones, at once."""
EMPTY = b"0-0"
"""The id before all entries of a stream."""
PAGE = 1000
"""Entries of one read."""


class Catalogue:
    """The lists of a store. Every method may raise MemoryStoreError."""

    def __init__(self, client: RedisClient, clock: StoreClock) -> None:
        self._client = client
        self._clock = clock

    async def note_use(self, tags: SequenceOf[str]) -> None:
        """Lists memories as used now."""
        now = f"{self._clock.now():.3f}"
        await self._client.results([("ZADD", memories_key(fingerprint_of(tag)), now, tag) for tag in tags])

    async def tags(self, fingerprint: str) -> list[str]:
        """The memories of a model, the latest used first."""
        found = await self._client.command("ZRANGE", memories_key(fingerprint), 0, -1, "REV")
        return [tag.decode() for tag in found]

    async def by_use(self, fingerprints: Iterable[str]) -> list[tuple[str, float]]:
        """The memories of some models, the least recently used first, each with the Unix time of its use."""
        keys = [memories_key(fingerprint) for fingerprint in fingerprints]
        answers = await self._client.results([("ZRANGE", key, 0, -1, "WITHSCORES") for key in keys])
        return sorted([pair for some in answers for pair in _pairs(some)], key=lambda pair: pair[1])

    async def used_before(self, fingerprint: str, time: float) -> list[tuple[str, float]]:
        """Those memories of a model that were last used before a Unix time, each with the time of its use."""
        command = "ZRANGEBYSCORE", memories_key(fingerprint), "-inf", f"({time:.3f}", "WITHSCORES"
        return _pairs(await self._client.command(*command))

    async def remove(self, fingerprint: str, times: Iterable[float]) -> None:
        """Removes memories by the times of their use, so that one stays that is used meanwhile."""
        key = memories_key(fingerprint)
        await self._client.results([("ZREMRANGEBYSCORE", key, repr(at), repr(at)) for at in times])

    async def note_kind(self, kind: str) -> None:
        """A process uses memories of a kind, see `Naming.kind`, now."""
        await self._client.command("ZADD", KINDS_KEY, int(self._clock.now()), kind)

    async def kinds(self) -> dict[str, float]:
        """For each kind of memories, the seconds since a process noted that it uses them."""
        now = self._clock.now()
        kinds = await self._client.command("ZRANGE", KINDS_KEY, 0, -1, "WITHSCORES")
        return {kind: max(0.0, now - at) for kind, at in _pairs(kinds)}


def _pairs(answer: list[Any]) -> list[tuple[str, float]]:
    return [(name.decode(), float(score)) for name, score in zip(answer[::2], answer[1::2], strict=True)]


class Memories:
    """The memories of a store. Every method may raise MemoryStoreError.

    Args:
        clock: follows the store's answers.

    Attributes:
        catalogue: lists them.
        other_bytes: what the store used besides memories when all of them were looked at last.
    """

    def __init__(self, client: RedisClient, clock: StoreClock) -> None:
        self.client = client
        self.clock = clock
        self.catalogue = Catalogue(client, clock)
        self.other_bytes = 0

    async def metadata(self, tag: str) -> MemoryMetadata:
        [metadata] = await self.metadata_of([tag])
        if isinstance(metadata, MemoryStoreError):
            raise metadata
        return metadata

    async def metadata_of(self, tags: SequenceOf[str]) -> list[MemoryMetadata | MemoryStoreError]:
        """Of each memory; or its error, if that concerns some keys alone (see `RedisClient.results`)."""
        if not tags:
            return []
        answers = await self.client.results([("TIME",), *map(_metadata_command, tags)], of_keys=True)
        if isinstance(answers[0], MemoryStoreError):
            raise answers[0]
        now = self.clock.synchronize(answers[0])
        return [
            answer if isinstance(answer, MemoryStoreError) else MemoryMetadata.of(answer, now) for answer in answers[1:]
        ]

    async def read(self, tag: str, epoch: int, after: bytes = EMPTY) -> list[Entry]:
        """The entries after an id, the oldest first, `PAGE` at most."""
        return entries_of(await self.client.command("XRANGE", stream_key(tag, epoch), b"(" + after, "+", "COUNT", PAGE))

    async def last_ids(self, memories: SequenceOf[tuple[str, int]]) -> list[bytes | MemoryStoreError]:
        """The id of the last entry of each (tag, epoch), or `EMPTY`; or its error, as `metadata_of`."""
        commands = [("XREVRANGE", stream_key(tag, epoch), "+", "-", "COUNT", 1) for tag, epoch in memories]
        answers = await self.client.results(commands, of_keys=True)
        return [
            answer if isinstance(answer, MemoryStoreError) else answer[0][0] if answer else EMPTY for answer in answers
        ]

    async def append(self, appends: SequenceOf[Append]) -> list[tuple[bytes | None, MemoryMetadata] | MemoryStoreError]:
        """Writes entries; for each its id and what the store says of the memory after it, or its error.

        No id: nothing was written, since the memory was purged, is of a newer version, or had begun (see `Append`). Of
        an append with an error nothing can be read.
        """
        answers = await self.client.commands([("TIME",), *map(_append, appends)])
        if isinstance(answers[0], MemoryStoreError):
            raise answers[0]
        now = self.clock.synchronize(answers[0])
        return [
            answer if isinstance(answer, MemoryStoreError) else (answer[0], MemoryMetadata.of(answer[1], now))
            for answer in answers[1:]
        ]

    async def renew(self, tag: str, epoch: int, expiry: float) -> None:
        """A memory was loaded: renews its expiry."""
        keys = (stream_key(tag, epoch), expiry), (tenant_key(tenant_part(tag)), expiry + _HASH_SECONDS)
        await self.client.results([_expire(*key) for key in keys])

    async def trim(self, tag: str, epoch: int, oldest: float) -> None:
        """Deletes the entries from before a Unix time."""
        await self.client.command("XTRIM", stream_key(tag, epoch), "MINID", max(0, int(1000 * oldest)))

    async def delete(self, tag: str, epoch: int) -> None:
        """Deletes a stream, and what the hash says of its memory but for the epoch.

        In this order: who writes to it meanwhile writes the entry first, so that no stream is left without its name.
        It stays in the list of memories, which `forget_listed` shortens.
        """
        field = _field(tag)
        unname = ("HDEL", tenant_key(tenant_part(tag)), f"n:{field}", f"t:{field}")
        await self.client.results([unname, ("UNLINK", stream_key(tag, epoch))])

    async def forget_listed(self, fingerprint: str) -> None:
        """Shortens the list of a model's memories by those that are gone, and were not used for `_HASH_SECONDS`."""
        listed = dict(await self.catalogue.used_before(fingerprint, self.clock.now() - _HASH_SECONDS))
        kept = {listed[stored.tag] for stored in await self.info([*listed])}
        await self.catalogue.remove(fingerprint, {*listed.values()} - kept)

    async def purge(self, part: str, arm: str | None = None, at_least: int = 0) -> dict[str, int]:
        """Raises the epoch of a tenant, or of one of its arms, and deletes the streams of earlier ones, all at once.

        Args:
            part: the tenant's name in keys.
            arm: its name in keys; None for the whole tenant.
            at_least: the lowest new epoch, where a process knows a later one than the store.

        Returns:
            The tags of the memories that were emptied, with their tokens.

        Raises:
            NewerMemoryError: a newer version wrote to them; nothing was purged.
        """
        key = tenant_key(part)
        streams = stream_prefix(part)
        purged = await self.client.run(
            Script(_PURGE, (key, f"{key}:none"), (SCHEMA, "*" if arm is None else arm, at_least, streams))
        )
        if purged is None:
            raise NewerMemoryError()
        named = [field.decode().split(":") for field in purged[::2]]
        tags = [f"{fingerprint}:{part}:{of_arm}" for fingerprint, of_arm in named]
        return dict(zip(tags, map(int, purged[1::2]), strict=True))

    async def restore_epoch(self, tag: str, epoch: int, lower: int) -> None:
        """The store lost a purge, as in a failover: this memory's epoch is `epoch`, not `found`."""
        fields = ("v", SCHEMA, f"g:{arm_part(tag)}", epoch)
        write_epoch = write_when_full("HSET", tenant_key(tenant_part(tag)), *fields)
        await self.client.results([write_epoch, ("UNLINK", stream_key(tag, lower))])

    async def usage(self) -> tuple[int, int]:
        """Bytes that the store uses, and its limit; (0, 0) without one, or if that cannot be known."""
        if self.client.is_cluster:
            return 0, 0
        try:
            found = await self.client.command("INFO", "memory")
        except StoreRefusedError:
            return 0, 0
        limit = int(found.get("maxmemory", 0))
        return (int(found["used_memory"]), limit) if limit else (0, 0)

    async def tags_of(self, part: str, fingerprint: str) -> list[str]:
        """The memories of a tenant and a model; `part` is its name in keys."""
        fields = _fields(await self.client.command("HGETALL", tenant_key(part)))
        return [tag for tag in _tags(fields, part, None) if fingerprint_of(tag) == fingerprint]

    async def info(self, tags: SequenceOf[str]) -> list[StoredMemory]:
        """Of those memories that hold something and can be read, in the order of the tags."""
        pairs = zip(tags, await self.metadata_of(tags), strict=True)
        readable = [(tag, metadata) for tag, metadata in pairs if isinstance(metadata, MemoryMetadata)]
        commands: list[Command] = []
        for tag, metadata in readable:
            stream, field = stream_key(tag, metadata.epoch), _field(tag)
            commands += [
                ("HMGET", tenant_key(tenant_part(tag)), f"n:{field}", f"t:{field}"),
                ("XLEN", stream),
                ("MEMORY", "USAGE", stream),
            ]
        answers = await self.client.results(commands, of_keys=True)
        stored: list[StoredMemory] = []
        for (tag, metadata), named, length, size in zip(
            readable, answers[::3], answers[1::3], answers[2::3], strict=True
        ):
            if length and not any(isinstance(answer, MemoryStoreError) for answer in (named, length, size)):
                name, tokens = named
                known = (name or b"", metadata.epoch, int(tokens or 0))
                stored.append(StoredMemory(tag, *known, size or 0, length, metadata.newer))
        return stored


def entries_of(answer: list[Any]) -> list[Entry]:
    """The entries of an answer to XRANGE, or of one stream of XREAD; deleted ones have no fields."""
    return [(id_, fields[b"e"]) for id_, fields in answer if fields and b"e" in fields]


def _metadata_command(tag: str) -> tuple[str, ...]:
    return "HMGET", tenant_key(tenant_part(tag)), "v", "g", f"g:{arm_part(tag)}"


def _append(append: Append) -> Command:
    stream, key = stream_key(append.tag, append.epoch), tenant_key(tenant_part(append.tag))
    bound = "MAXLEN", max(1, append.max_bytes // _MIN_ENTRY_BYTES)
    kept = bound if append.first_id is None else ("MINID", append.first_id)
    expiries = [round(1000 * seconds) for seconds in (append.expiry and append.expiry + _HASH_SECONDS, append.expiry)]
    known = SCHEMA, arm_part(append.tag), append.epoch, _field(append.tag), append.name
    tokens = "" if append.tokens is None else append.tokens
    return eval_command(
        Script(_APPEND, (key, stream), (*known, tokens, *expiries, int(append.begins), *kept, *append.values))
    )


def _expire(key: str, seconds: float) -> tuple[str | int, ...]:
    return ("PEXPIRE", key, round(1000 * seconds)) if seconds else ("PERSIST", key)


def _field(tag: str) -> str:
    return f"{fingerprint_of(tag)}:{arm_part(tag)}"


def _fields(answer: Any) -> dict[str, bytes]:
    return {name.decode(): value for name, value in answer.items()}


def _tags(fields: dict[str, bytes], part: str, arm: str | None) -> list[str]:
    """The memories that a tenant's hash names, of one arm or of all."""
    named = [field.split(":")[1:] for field in fields if field.startswith("n:")]
    return [f"{fingerprint}:{part}:{name}" for fingerprint, name in named if arm in (None, name)]
