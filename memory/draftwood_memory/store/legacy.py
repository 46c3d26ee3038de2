"""What earlier versions stored (schemas 1 and 2, keys `dw:{FINGERPRINT:TENANT:ARM}:log` and others).

It is not read. While replicas of those versions run, it is theirs, and a purge here reaches it; then it is deleted.
"""

from __future__ import annotations

import logging
import time

from draftwood_memory.store.naming import fingerprint_of
from draftwood_memory.store.redis_client import RedisClient

_log = logging.getLogger(__name__)

_SUFFIXES = ("log", "snap", "meta", "lease", "aside")
_ALIVE_SECONDS = 100.0
"""A replica of an earlier version that has not registered for so long has ended; they register every 30 seconds."""
_TOMBSTONE_SECONDS = 30 * 24 * 3600
_BATCH = 500


async def discard(client: RedisClient, fingerprint: str) -> None:
    """Deletes what earlier versions stored of a model, if none of their replicas runs. Raises MemoryStoreError."""
    active, counter, instances = (f"dw:{{{fingerprint}}}:{one}" for one in ("active", "turn", "instances"))
    tags = await client.command("ZRANGE", active, 0, -1)
    if not tags:
        return
    seen = (await client.command("HGETALL", instances)).values()
    if any(time.time() - float(one.split(b" ")[0]) < _ALIVE_SECONDS for one in seen):
        return
    for start in range(0, len(tags), _BATCH):
        keys = [f"dw:{{{tag.decode()}}}:{suffix}" for tag in tags[start : start + _BATCH] for suffix in _SUFFIXES]
        await client.commands([("UNLINK", key) for key in keys])
    await client.commands([("UNLINK", key) for key in (active, counter, instances)])
    _log.warning("memories of an earlier version were deleted, since this one does not read them: %d", len(tags))


async def purge(client: RedisClient, fingerprint: str, matches: str) -> None:
    """Empties the memories of an earlier version whose tag begins with `matches`, so that its replicas drop them too.

    Raises:
        MemoryStoreError: the store failed.
    """
    for tag in await client.command("ZRANGE", f"dw:{{{fingerprint}}}:active", 0, -1):
        name = tag.decode()
        if not name.startswith(matches):
            continue
        assert fingerprint_of(name) == fingerprint
        keys = {suffix: f"dw:{{{name}}}:{suffix}" for suffix in _SUFFIXES}
        now = time.time()
        fields = ("epoch", int(now * 1e6), "pos", 0, "chain", "", "purged", int(now * 1e3), "schema", 2)
        await client.commands(
            [
                *(("UNLINK", key) for key in keys.values()),
                ("HSET", keys["meta"], *fields),
                ("PEXPIRE", keys["meta"], 1000 * _TOMBSTONE_SECONDS),
            ]
        )
