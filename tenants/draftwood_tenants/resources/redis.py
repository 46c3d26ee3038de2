"""Resources in Redis or Valkey.

All keys have one hash tag, so that one script can change them together: `dw:{resources}:meta` (a hash: revision, floor,
schema, store), `:values` (a hash: key to value), `:changes` (a sorted set of the keys of all resources and of the
deleted ones that are remembered, by revision) and `:deleted` (a sorted set of the latter). Revisions are at least the
server's clock in microseconds: a store that lost its data does not use one again. `store` in `:meta` is a random id,
drawn at the first write, by which a store that lost its data differs from one that never had any. With keys set, names
are hidden and values encrypted, as memories are.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf

from draftwood_memory.errors import CorruptValueError, StoreRefusedError, StoreUnavailableError
from draftwood_memory.store.encryption import KeyRing, Plain
from draftwood_memory.store.naming import Naming
from draftwood_memory.store.redis_client import RedisClient, Script
from draftwood_tenants.resources.store import MAX_DELETED, ConflictError, Cursor, Page, Resource, Write

_LENGTH_BYTES = 2

_log = logging.getLogger(__name__)
SCHEMA = 1
"""Of keys and values. A store with a newer one is read as far as possible and not changed."""
_PAGE = 500
"""Resources of a page."""
# ARGV: schema since most_deleted store, then key expected deleted value for each write. The first command that writes
# needs no memory: after one a full server lets a script go on.
_WRITE = """
local meta, values, changes, deleted = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local m = redis.call('HMGET', meta, 'revision', 'floor', 'schema', 'store')
local revision, floor, store = tonumber(m[1] or 0), tonumber(m[2] or 0), m[4] or ''
if tonumber(m[3] or 0) > tonumber(ARGV[1]) then return {'newer'} end
local restoring = revision == 0 and ARGV[2] == '0'
if ARGV[4] ~= '' and ARGV[4] ~= store and not restoring then return {'lost'} end
if ARGV[2] ~= '' and tonumber(ARGV[2]) ~= revision then return {'changed'} end
for i = 5, #ARGV, 4 do
  local found = 0
  if redis.call('HEXISTS', values, ARGV[i]) == 1 then found = tonumber(redis.call('ZSCORE', changes, ARGV[i])) end
  if found ~= tonumber(ARGV[i + 1]) then return {'conflict', (i - 5) / 4, found} end
end
local time, given = redis.call('TIME'), {'ok'}
local new = math.max(revision, time[1] * 1000000 + time[2])
if revision == 0 then floor = new end
if store == '' then store = ARGV[4] ~= '' and ARGV[4] or string.format('%d', new) end
redis.call('ZREM', deleted, '')
for i = 5, #ARGV, 4 do
  new = new + 1
  local score = string.format('%d', new)
  redis.call('ZADD', changes, score, ARGV[i])
  if ARGV[i + 2] == '1' then
    redis.call('HDEL', values, ARGV[i])
    redis.call('ZADD', deleted, score, ARGV[i])
  else
    redis.call('HSET', values, ARGV[i], ARGV[i + 3])
    redis.call('ZREM', deleted, ARGV[i])
  end
  given[#given + 1] = new
end
while redis.call('ZCARD', deleted) > tonumber(ARGV[3]) do
  local oldest = redis.call('ZPOPMIN', deleted)
  redis.call('ZREM', changes, oldest[1])
  floor = tonumber(oldest[2])
end
redis.call('HSET', meta, 'revision', string.format('%d', new), 'floor', string.format('%d', floor), 'schema', ARGV[1],
  'store', store)
return given
"""
# ARGV: revision floor page store. Returns revision, floor, full, more, store, time, then key revision value for each
# change.
_CHANGES = """
local meta, values, changes = KEYS[1], KEYS[2], KEYS[3]
local m, time = redis.call('HMGET', meta, 'revision', 'floor', 'store'), redis.call('TIME')
local revision, floor, after = tonumber(m[1] or 0), tonumber(m[2] or 0), tonumber(ARGV[1])
local store, now = m[3] or '', time[1] .. '.' .. string.format('%06d', time[2])
local full = after > revision or (floor ~= tonumber(ARGV[2]) and after < floor) or (ARGV[4] ~= '' and ARGV[4] ~= store)
if not full and after == revision then return {revision, floor, 0, 0, store, now} end
if full then after = 0 end
local found = redis.call('ZRANGEBYSCORE', changes, string.format('(%d', after), '+inf', 'WITHSCORES', 'LIMIT', 0,
  tonumber(ARGV[3]))
local more = #found == 2 * tonumber(ARGV[3])
if more then revision = tonumber(found[#found]) end
local given = {revision, floor, full and 1 or 0, more and 1 or 0, store, now}
for i = 1, #found, 2 do
  given[#given + 1] = found[i]
  given[#given + 1] = tonumber(found[i + 1])
  given[#given + 1] = redis.call('HGET', values, found[i])
end
return given
"""


class ResourceCipher:
    """Between a resource and its key and value in a store.

    Args:
        keys: None stores names and values as they are.
    """

    def __init__(self, keys: KeyRing | None) -> None:
        self._values = keys or Plain()
        self._secret = keys.naming_key if keys else None

    def key(self, kind: str, name: str) -> str:
        """ "KIND:NAME:", the name quoted, or hidden."""
        return Naming(kind, self._secret).tenant_prefix(name)

    def is_own(self, key: str) -> bool:
        """Whether a key's name is written as this writes names: plain, or hidden with the same key."""
        kind, _, rest = key.partition(":")
        hidden = Naming(kind, self._secret).tenant_prefix("").partition(":!")[2].partition(".")[0]
        return rest.startswith(f"!{hidden}.") if hidden else not rest.startswith("!")

    def encrypt(self, kind: str, name: str, value: bytes) -> bytes:
        """The name and the value, bound to their key."""
        encoded = name.encode()
        joined = len(encoded).to_bytes(_LENGTH_BYTES) + encoded + value
        return self._values.encrypt(joined, self.key(kind, name), "resource")

    def decrypt(self, key: str, data: bytes) -> tuple[str, str, bytes]:
        """Kind, name and value. Raises CorruptValueError."""
        joined = self._values.decrypt(data, key, "resource")
        end = _LENGTH_BYTES + int.from_bytes(joined[:_LENGTH_BYTES])
        kind, name = key.partition(":")[0], joined[_LENGTH_BYTES:end].decode(errors="replace")
        if self.key(kind, name) != key:
            raise CorruptValueError("the value is another resource's, or cut short")
        return kind, name, joined[end:]


_KEYS = tuple(f"dw:{{resources}}:{suffix}" for suffix in ("meta", "values", "changes", "deleted"))


class RedisResources:
    """A `ResourceStore` on a server, a group behind Sentinel or a cluster.

    Args:
        client: closed with the store.
    """

    def __init__(self, client: RedisClient, cipher: ResourceCipher) -> None:
        self._client = client
        self._cipher = cipher

    def key(self, kind: str, name: str) -> str:
        return self._cipher.key(kind, name)

    async def write(self, writes: SequenceOf[Write], since: int | None = None, store: str = "") -> list[int]:
        """Raises ConflictError, MemoryStoreError."""
        arguments: list[str | int | bytes] = [SCHEMA, "" if since is None else since, MAX_DELETED, store]
        for write in writes:
            encrypted = b"" if write.value is None else self._cipher.encrypt(write.kind, write.name, write.value)
            key = self._cipher.key(write.kind, write.name)
            arguments += [key, write.expected, int(write.value is None), encrypted]
        answer, *rest = await self._client.run(Script(_WRITE, _KEYS, arguments))
        if answer == b"newer":
            raise StoreRefusedError("a newer version of this program wrote the configuration; upgrade this server")
        if answer == b"lost":
            raise StoreUnavailableError("the store lost the configuration, which is restored; try again")
        if answer == b"changed":
            raise ConflictError(None)
        if answer == b"conflict":
            raise ConflictError(*rest)
        return [*map(int, rest)]

    async def changes(self, after: Cursor) -> Page:
        """Raises MemoryStoreError."""
        script = Script(_CHANGES, _KEYS[:3], [after.revision, after.floor, _PAGE, after.store])
        answer = await self._client.run(script)
        revision, floor, is_snapshot, more, store, time, *rest = answer
        changes: dict[str, Resource | None] = {}
        unreadable = set()
        for key, number, value in zip(map(bytes.decode, rest[::3]), rest[1::3], rest[2::3], strict=True):
            try:
                changes[key] = None if value is None else Resource(*self._cipher.decrypt(key, value), number)
            except CorruptValueError as error:
                unreadable.add(key)
                _log.error("a stored resource cannot be read: %s: %s", key, error)
        return Page(
            changes,
            Cursor(revision, floor, store.decode()),
            bool(is_snapshot),
            bool(more),
            frozenset(unreadable),
            frozenset(key for key in unreadable if not self._cipher.is_own(key)),
            float(time),
        )

    async def close(self) -> None:
        await self._client.close()
