"""What a process tells the others in the store: which kind of memories it uses, and with which settings.

From that follow warnings about settings that differ, and the memories that no process uses (see `orphans`), which are
deleted after a while.
"""

from __future__ import annotations

import time

import structlog

from draftwood_service.memory.codec import Codec
from draftwood_service.memory.config import MemoryConfig
from draftwood_service.memory.naming import Naming
from draftwood_service.memory.orphans import ORPHANED_SECONDS, orphans, purge_all
from draftwood_service.memory.replica.counters import MemoryCounters
from draftwood_service.memory.store.base import MemoryStore

_log = structlog.get_logger(__name__)

_REGISTER_SECONDS = 30.0
"""Between two registrations. Not tuned: a third of what `INSTANCE_SECONDS` allows."""
_EXPIRY_SECONDS = 600.0
_EXPIRY_BATCH = 100
"""How often orphaned memories are deleted after their time to live, and at most how many at once, so that rounds stay
short. Not tuned."""


class Presence:
    """This process, as the others on its store see it.

    Args:
        instance: identifies this process.
    """

    def __init__(
        self,
        store: MemoryStore,
        naming: Naming,
        codec: Codec,
        config: MemoryConfig,
        instance: str,
        counters: MemoryCounters,
    ) -> None:
        self._store = store
        self._naming = naming
        self._codec = codec
        self._orphan_ttl = config.orphan_ttl
        self._instance = instance
        self._counters = counters
        names = naming.kind.partition(":")[2] or "plain"
        self._settings = (
            f"tokens={config.tokens} bytes={config.bytes} ttl={config.ttl:g} age={config.max_age:g} names={names}"
        )
        self._warned: list[str] = []
        self._registered_at = self._expired_at = -float("inf")

    async def note(self) -> None:
        """Registers this process, if it is time. Raises MemoryStoreError."""
        now = time.monotonic()
        if now - self._registered_at < _REGISTER_SECONDS:
            return
        others = await self._store.register(self._naming.kind, self._instance, self._settings)
        self._registered_at = now
        different = sorted(other for other in others if other != self._settings)
        self._counters.other_settings = len(different)
        if different and different != self._warned:
            _log.warning("servers on this store have other memory settings", ours=self._settings, theirs=different)
        self._warned = different
        if self._orphan_ttl and now - self._expired_at > _EXPIRY_SECONDS:
            await self._delete_expired()
            self._expired_at = now

    async def _delete_expired(self) -> None:
        seconds = max(self._orphan_ttl, ORPHANED_SECONDS)
        found = await orphans(self._store, self._naming, self._codec, seconds)
        if found:
            purged = await purge_all(self._store, found[:_EXPIRY_BATCH])
            _log.info("memories that no server uses were deleted", memories=purged.memories, tokens=purged.tokens)
