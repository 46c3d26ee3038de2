"""Counts in Redis or Valkey.

All keys of an experiment have one hash tag: `dw:{counts:NAME:}:sequences` and `:values` (hashes by `Target.field`),
`:history` (a hash by definition) and `:deleted` (the definition that was deleted last, for an hour).
"""

from __future__ import annotations

from collections.abc import Mapping

from draftwood_memory.errors import CorruptValueError
from draftwood_memory.store.redis_client import RedisClient, Script
from draftwood_tenants.experiments.counters import Origin
from draftwood_tenants.experiments.store.base import EncodedSnapshot, Target, origin_of
from draftwood_tenants.resources.encryption import ResourceCipher

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
        found: list[EncodedSnapshot] = []
        while True:
            pairs: list[str | int | bytes] = [one for pair in seen.items() for one in pair]
            answer = await self._client.run(Script(_READ, [sequences, values], [target.definition, _PAGE, *pairs]))
            for field_bytes, sequence, value in zip(answer[::3], answer[1::3], answer[2::3], strict=True):
                field = field_bytes.decode()
                seen[field] = int(sequence)
                found.append(EncodedSnapshot(origin_of(field), int(sequence), self._decrypted(target, field, value)))
            if len(answer) < 3 * _PAGE:
                return found

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
