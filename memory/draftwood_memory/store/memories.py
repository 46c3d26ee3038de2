"""Memories in Redis or Valkey: a stream of entries for each, and a hash for each tenant.

A tenant's hash has the fields: `v`, the highest `SCHEMA` that wrote to it; `g`, the tenant's generation, and `g:ARM`,
that of an arm; `n:FINGERPRINT:ARM`, a memory's encoded name, and `t:FINGERPRINT:ARM`, its tokens; `f:FINGERPRINT:ARM`,
once a process has begun it with a copy (see `claim`); `dead`, generations whose streams a purge has not deleted yet.

The generation of a memory is the higher one of its tenant's and its arm's: the time of the last purge, in microseconds
of the store's clock, or 0. It is part of the stream's key. So an entry that a process writes after a purge of which it
has not heard is in a stream that nothing reads, which its writer deletes when it hears, or its expiry.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

from draftwood_memory.errors import MemoryStoreError, NewerMemoryError, StoreRefusedError
from draftwood_memory.store.catalogue import Catalogue
from draftwood_memory.store.clock import StoreClock
from draftwood_memory.store.naming import (
    SCHEMA,
    arm_part,
    fingerprint_of,
    stream_key,
    tenant_key,
    tenant_part,
)
from draftwood_memory.store.redis_client import Command, RedisClient, write_when_full
from draftwood_memory.store.stored import Append, Entry, MemoryMetadata, StoredMemory

_HASH_SECONDS = 30 * 24 * 3600
"""By how much a tenant's hash outlives its streams, so that no late entry is read again. It has to outlast
every outbox, and every replica that has not heard of a purge."""
_MIN_ENTRY_BYTES = 64
"""Bounds a stream that is written by processes that have not loaded it: no entry is smaller."""
EMPTY = b"0-0"
"""The id before all entries of a stream."""
PAGE = 1000
"""Entries of one read."""


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
        return [one if isinstance(one, MemoryStoreError) else MemoryMetadata.of(one, now) for one in answers[1:]]

    async def read(self, tag: str, generation: int, after: bytes = EMPTY) -> list[Entry]:
        """The entries after an id, the oldest first, `PAGE` at most."""
        return entries_of(
            await self.client.command("XRANGE", stream_key(tag, generation), b"(" + after, "+", "COUNT", PAGE)
        )

    async def last_ids(self, memories: SequenceOf[tuple[str, int]]) -> list[bytes | MemoryStoreError]:
        """The id of the last entry of each (tag, generation), or `EMPTY`; or its error, as `metadata_of`."""
        commands = [("XREVRANGE", stream_key(*one), "+", "-", "COUNT", 1) for one in memories]
        answers = await self.client.results(commands, of_keys=True)
        return [one if isinstance(one, MemoryStoreError) else one[0][0] if one else EMPTY for one in answers]

    async def append(self, appends: SequenceOf[Append]) -> list[tuple[bytes, MemoryMetadata] | MemoryStoreError]:
        """Writes entries; for each its id and what the store says of the memory after it, or its error.

        A purge that comes before the entry shows in its `MemoryMetadata`; one that comes after it deletes the entry. An
        entry whose expiry or name could not be written is taken back: no purge would find it.
        """
        commands: list[Command] = [("TIME",)]
        for one in appends:
            commands += _append(one)
        answers = await self.client.commands(commands)
        if isinstance(answers[0], MemoryStoreError):
            raise answers[0]
        now = self.clock.synchronize(answers[0])
        results: list[tuple[bytes, MemoryMetadata] | MemoryStoreError] = []
        taken_back: list[Command] = []
        size = (len(commands) - 1) // max(1, len(appends))
        for i, entry in enumerate(appends):
            id_, *_, metadata = answer = answers[1 + i * size : 1 + (i + 1) * size]
            error = next((part for part in answer if isinstance(part, MemoryStoreError)), None)
            results.append((id_, MemoryMetadata.of(metadata, now)) if error is None else error)
            if error is not None and isinstance(id_, bytes):
                taken_back.append(("XDEL", stream_key(entry.tag, entry.generation), id_))
        await self.client.commands(taken_back)
        return results

    async def renew(self, tag: str, generation: int, expiry: float) -> None:
        """A memory was loaded: renews its expiry."""
        keys = (stream_key(tag, generation), expiry), (tenant_key(tenant_part(tag)), expiry + _HASH_SECONDS)
        await self.client.results([_expire(*one) for one in keys])

    async def trim(self, tag: str, generation: int, oldest: float) -> None:
        """Deletes the entries from before a Unix time."""
        await self.client.command("XTRIM", stream_key(tag, generation), "MINID", max(0, int(1000 * oldest)))

    async def delete(self, tag: str, generation: int) -> None:
        """Deletes a stream, and what the hash says of its memory but for the generation.

        In this order: who writes to it meanwhile writes the entry first, so that no stream is left without its name.
        It stays in the list of memories, which `forget_listed` shortens.
        """
        field = _field(tag)
        unname = ("HDEL", tenant_key(tenant_part(tag)), f"n:{field}", f"t:{field}")
        await self.client.results([unname, ("UNLINK", stream_key(tag, generation))])

    async def forget_listed(self, fingerprint: str) -> None:
        """Shortens the list of a model's memories by those that are gone, and were not used for `_HASH_SECONDS`."""
        listed = dict(await self.catalogue.used_before(fingerprint, self.clock.now() - _HASH_SECONDS))
        kept = {listed[one.tag] for one in await self.info([*listed])}
        await self.catalogue.remove(fingerprint, {*listed.values()} - kept)

    async def unlink(self, tag: str, generation: int) -> None:
        """Deletes the stream of a generation that has passed."""
        await self.client.command("UNLINK", stream_key(tag, generation))

    async def claim(self, tag: str) -> bool:
        """The right to begin a memory with a copy of other records; one process gets it."""
        return bool(await self.client.command("HSETNX", tenant_key(tenant_part(tag)), f"f:{_field(tag)}", 1))

    async def purge(self, part: str, arm: str | None = None, at_least: int = 0) -> dict[str, int]:
        """Raises the generation of a tenant, or of one of its arms, and deletes the streams of earlier ones.

        The generation comes first: if this process dies after it, nothing reads those streams, the next purge deletes
        them, and their expiry if there is none.

        Args:
            part, arm: names as in keys; all arms with None.
            at_least: lower bound of the new generation.

        Returns:
            The tags of the memories that the hash named, with their tokens. Other processes do not know of it yet.

        Raises:
            NewerMemoryError: a newer version wrote to the tenant's memories.
        """
        key = tenant_key(part)
        hash_, clock = await self.client.results([("HGETALL", key), ("TIME",)])
        fields = _fields(hash_)
        if int(fields.get("v", 0)) > SCHEMA:
            raise NewerMemoryError()
        passed = {int(one) for one in fields.get("dead", b"0").split(b",")}
        passed |= {int(value) for name, value in fields.items() if name == "g" or name.startswith("g:")}
        now = int(1e6 * self.clock.synchronize(clock))
        generation = max(now, at_least, *(one + 1 for one in passed))
        dead = b",".join(b"%d" % one for one in sorted(passed))
        write_generation = write_when_full(
            "HSET", key, "v", SCHEMA, "g" if arm is None else f"g:{arm}", generation, "dead", dead
        )
        await self.client.results([write_generation])
        # What was named until now, too: a writer that is later finds the generation raised, and deletes its entry.
        tags = _tags(_fields(await self.client.command("HGETALL", key)), part, arm)
        streams = [("UNLINK", stream_key(tag, one)) for tag in tags for one in sorted(passed)]
        forgotten = [("HDEL", key, f"t:{_field(tag)}") for tag in tags]
        await self.client.results([*streams, *forgotten, ("HDEL", key, "dead")])
        return {tag: int(fields.get(f"t:{_field(tag)}", 0)) for tag in tags}

    async def restore_generation(self, tag: str, generation: int, found: int) -> None:
        """The store lost a purge, as in a failover: this memory's generation is `generation`, not `found`."""
        fields = ("v", SCHEMA, f"g:{arm_part(tag)}", generation)
        write_generation = write_when_full("HSET", tenant_key(tenant_part(tag)), *fields)
        await self.client.results([write_generation, ("UNLINK", stream_key(tag, found))])

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
            stream, field = stream_key(tag, metadata.generation), _field(tag)
            commands += [
                ("HMGET", tenant_key(tenant_part(tag)), f"n:{field}", f"t:{field}"),
                ("XLEN", stream),
                ("MEMORY", "USAGE", stream),
            ]
        answers = await self.client.results(commands, of_keys=True)
        found: list[StoredMemory] = []
        for (tag, metadata), named, length, size in zip(
            readable, answers[::3], answers[1::3], answers[2::3], strict=True
        ):
            if length and not any(isinstance(answer, MemoryStoreError) for answer in (named, length, size)):
                name, tokens = named
                known = (name or b"", metadata.generation, int(tokens or 0))
                found.append(StoredMemory(tag, *known, size or 0, length, metadata.newer))
        return found


def entries_of(answer: list[Any]) -> list[Entry]:
    """The entries of an answer to XRANGE, or of one stream of XREAD; deleted ones have no fields."""
    return [(id_, fields[b"e"]) for id_, fields in answer if fields and b"e" in fields]


def _metadata_command(tag: str) -> tuple[str, ...]:
    return "HMGET", tenant_key(tenant_part(tag)), "v", "g", f"g:{arm_part(tag)}"


def _append(one: Append) -> list[Command]:
    stream, key, field = stream_key(one.tag, one.generation), tenant_key(tenant_part(one.tag)), _field(one.tag)
    bound = ("MAXLEN", "~", max(1, one.max_bytes // _MIN_ENTRY_BYTES))
    kept = bound if one.first_id is None else ("MINID", "~", one.first_id)
    tokens = () if one.tokens is None else (f"t:{field}", one.tokens)
    return [
        ("XADD", stream, *kept, "*", "e", one.value),
        _expire(stream, one.expiry),
        ("HSET", key, "v", SCHEMA, f"n:{field}", one.name, *tokens),
        _expire(key, one.expiry and one.expiry + _HASH_SECONDS),
        _metadata_command(one.tag),
    ]


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
