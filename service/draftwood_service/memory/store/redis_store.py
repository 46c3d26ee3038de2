"""The store in Redis or Valkey. Each change of a memory is one Lua script (see `scripts`)."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence as SequenceOf
from typing import Any

from draftwood_service.memory.errors import MemoryStoreError, NewerMemoryError, StoreFullError
from draftwood_service.memory.naming import KINDS_KEY, Keys, activity_keys, fingerprint_of, instances_key
from draftwood_service.memory.store.base import (
    INSTANCE_SECONDS,
    SCHEMA,
    TOMBSTONE_SECONDS,
    Append,
    Appended,
    AppendResult,
    Fold,
    Limits,
    LogFull,
    Lost,
    Page,
    ReadRequest,
    Stale,
    StoredMemoryInfo,
)
from draftwood_service.memory.store.redis_client import RedisClient, Script
from draftwood_service.memory.store.scripts import (
    ACTIVITY,
    ANNOUNCE,
    APPEND,
    FOLD,
    INFO,
    KINDS,
    LEASE,
    PURGE,
    READ,
    REGISTER,
    SEED,
    SERVE,
    SET_ASIDE,
)

_ASIDE_SECONDS = 7 * 24 * 3600
"""How long an unreadable snapshot is kept for inspection. Not tuned."""
_MAX_MARKS = 128
_MARK_SECONDS = 24 * 3600
"""With more than `_MAX_MARKS` sources, those without a record for so long lose their mark. Processes keep unconfirmed
records for an hour, so any longer time is safe; not tuned beyond that."""
_INFO_BATCH = 500
"""Memories per round trip of `info`. Not tuned: it bounds the size of one answer."""


class RedisStore:
    """A `MemoryStore` behind a Redis client.

    Args:
        fingerprint: of the memories' model.
        schema: as `SCHEMA`; another one for tests.
    """

    shared = True

    def __init__(self, client: RedisClient, fingerprint: str, limits: Limits, schema: int = SCHEMA) -> None:
        self._client = client
        self._schema = schema
        self._limits = limits
        self.description = client.description
        self._fingerprint = fingerprint
        self._active = activity_keys(fingerprint)

    async def append(self, appends: SequenceOf[Append]) -> list[AppendResult]:
        if not appends:
            return []
        # Announced before it is appended: a reader that finds nothing yet reads again for a while, and a process that
        # dies in between leaves no record unannounced.
        announce = Script(ANNOUNCE, self._active, [append.tag for append in appends])
        answers = await self._client.run_all([announce, *map(self._append, appends)])
        return [_appended(answer) for answer in answers[1:]]

    async def read(self, requests: SequenceOf[ReadRequest]) -> list[Page | MemoryStoreError]:
        scripts = [Script(READ, _main_keys(one.tag), [one.position, one.source]) for one in requests]
        return [self._page(answer) for answer in await self._client.run_all(scripts)]

    async def activity(self, after: int) -> tuple[int, list[str]]:
        now, tags = await self._client.run(Script(ACTIVITY, self._active, [after]))
        return int(now), [tag.decode() for tag in tags]

    async def lease(self, tag: str, holder: str, seconds: float) -> bool:
        key = Keys.of(tag).lease
        return bool(await self._client.run(Script(LEASE, [key, f"{key}:none"], [holder, round(1000 * seconds)])))

    async def fold(self, fold: Fold, holder: str) -> bool:
        keys = Keys.of(fold.tag)
        arguments: list[str | int | bytes] = [
            holder, fold.epoch, fold.position, fold.chain, fold.tokens, fold.records, fold.value, fold.tail,
            self._ttl(fold.limits),
            _MAX_MARKS, _MARK_SECONDS, self._schema,
        ]  # fmt: skip
        return bool(await self._client.run(Script(FOLD, [*_main_keys(fold.tag), keys.lease], arguments)))

    async def seed(self, fold: Fold) -> bool:
        arguments: list[str | int | bytes] = [
            fold.epoch, fold.position, fold.chain, fold.tokens, fold.records, fold.value, fold.name,
            self._ttl(fold.limits),
            self._schema,
        ]  # fmt: skip
        for source, mark in fold.marks.items():
            arguments += [source, mark]
        await self._client.run(Script(ANNOUNCE, self._active, [fold.tag]))
        return bool(await self._client.run(Script(SEED, _main_keys(fold.tag), arguments)))

    async def purge(self, tag: str, at_least: int, only_raise: bool = False) -> int:
        keys = Keys.of(tag)
        arguments = [at_least, int(only_raise), 1000 * TOMBSTONE_SECONDS, self._schema]
        epoch = int(await self._client.run(Script(PURGE, [*_main_keys(tag), keys.lease, keys.aside], arguments)))
        if epoch < 0:
            raise NewerMemoryError()
        # Afterwards, since a server that is full refuses it: a purge is what makes room. Who does not hear of it
        # compares its memory with the store's before long.
        with contextlib.suppress(StoreFullError):
            await self._client.run(Script(ANNOUNCE, activity_keys(fingerprint_of(tag)), [tag]))
        return epoch

    async def set_aside(self, tag: str, snapshot: bytes) -> bool:
        keys = Keys.of(tag)
        digest = hashlib.sha1(snapshot, usedforsecurity=False).hexdigest()
        script = Script(
            SET_ASIDE, [keys.snapshot, keys.aside, keys.meta], [digest, 1000 * _ASIDE_SECONDS, self._schema]
        )
        return bool(await self._client.run(script))

    async def tags(self, fingerprint: str | None = None) -> list[str]:
        active = activity_keys(fingerprint or self._fingerprint)[0]
        return [tag.decode() for tag in await self._client.command("ZRANGE", active, 0, -1, "REV")]

    async def register(self, kind: str, instance: str, settings: str) -> list[str]:
        await self._client.run(Script(SERVE, [KINDS_KEY, f"{KINDS_KEY}:none"], [kind]))
        key = instances_key(fingerprint_of(kind))
        others = await self._client.run(
            Script(REGISTER, [key, f"{key}:none"], [instance, settings, round(INSTANCE_SECONDS)])
        )
        return [other.decode() for other in others]

    async def kinds(self) -> dict[str, float]:
        found = await self._client.run(Script(KINDS, [KINDS_KEY], []))
        return {kind.decode(): float(seconds) for kind, seconds in zip(found[::2], found[1::2], strict=True)}

    async def info(self, tags: SequenceOf[str]) -> list[StoredMemoryInfo]:
        found: list[StoredMemoryInfo] = []
        for start in range(0, len(tags), _INFO_BATCH):
            some = tags[start : start + _INFO_BATCH]
            answers = await self._client.run_all([Script(INFO, _main_keys(tag), []) for tag in some])
            for tag, answer in zip(some, answers, strict=True):
                if answer == []:
                    await self._client.command("ZREM", activity_keys(fingerprint_of(tag))[0], tag)
            found += [
                self._info(tag, answer)
                for tag, answer in zip(some, answers, strict=True)
                if answer and not isinstance(answer, MemoryStoreError)
            ]
        return found

    async def close(self) -> None:
        await self._client.close()

    def _ttl(self, limits: Limits | None) -> int:
        return round(1000 * (limits or self._limits).ttl)

    def _append(self, append: Append) -> Script:
        arguments: list[str | int | bytes] = [
            append.epoch, append.source, (append.limits or self._limits).log_bytes, self._ttl(append.limits),
            append.name, append.after, self._schema,
        ]  # fmt: skip
        for entry in append.entries:
            arguments += [entry.seq, entry.tokens, entry.value]
        return Script(APPEND, _main_keys(append.tag), arguments)

    def _page(self, answer: Any) -> Page | MemoryStoreError:
        if isinstance(answer, MemoryStoreError):
            return answer
        if not answer:
            return Page(None)
        epoch, position, chain, start, before, missing, mark, since, snapshot, values, ttl, schema = answer
        return Page(
            epoch=epoch,
            position=position,
            chain=chain.decode(),
            start=start,
            before=before.decode(),
            values=values,
            snapshot=snapshot or None,
            snapshot_missing=bool(missing),
            mark=mark,
            since_purge=None if since < 0 else since / 1000,
            expires_in=None if ttl < 0 else ttl / 1000,
            newer=schema > self._schema,
        )

    def _info(self, tag: str, answer: Any) -> StoredMemoryInfo:
        epoch, position, tokens, size, entries, age, name, schema = answer
        snapshot_age = None if age < 0 else float(age)
        newer = schema > self._schema
        return StoredMemoryInfo(tag, name, epoch, position, tokens, size, entries, snapshot_age, newer)


def _main_keys(tag: str) -> list[str]:
    keys = Keys.of(tag)
    return [keys.log, keys.snapshot, keys.meta]


def _appended(answer: Any) -> AppendResult:
    if isinstance(answer, MemoryStoreError):
        return answer
    if answer[0] == b"newer":
        return NewerMemoryError()
    if answer[0] == b"stale":
        return Stale(int(answer[1]))
    if answer[0] == b"full":
        return LogFull()
    if answer[0] == b"lost":
        return Lost()
    return Appended(*map(int, answer[1:]))
