"""One process's copy of the memories that it uses, kept equal to the store's.

`round` is called again and again; whatever fails in it is done in a later one.
"""

from __future__ import annotations

import asyncio
import time

from draftwood_service.memory.codec import Codec
from draftwood_service.memory.errors import MemoryStoreError
from draftwood_service.memory.presence import Presence
from draftwood_service.memory.replica.counters import MemoryCounters
from draftwood_service.memory.replica.folder import Folder
from draftwood_service.memory.replica.follower import Follower, LearnRecords
from draftwood_service.memory.replica.outbox import Outbox
from draftwood_service.memory.replica.page_reader import PageReader
from draftwood_service.memory.replica.pusher import Pusher
from draftwood_service.memory.replica.residents import Residents
from draftwood_service.memory.store.base import MemoryStore

_EVICT_SECONDS = 1.0
"""Between two evictions. Not tuned: it bounds how long surplus memories stay."""


class Replica:
    """Pushes the outbox, follows the store's logs and folds them.

    Attributes:
        lock: held during a round, and by an operation while it uses memories or store.
    """

    def __init__(
        self,
        store: MemoryStore,
        residents: Residents,
        outbox: Outbox,
        codec: Codec,
        learn: LearnRecords,
        counters: MemoryCounters,
        presence: Presence,
    ) -> None:
        self.store = store
        self.outbox = outbox
        self.counters = counters
        self.pusher = Pusher(store, residents, outbox, codec, counters)
        self.folder = Folder(store, residents, codec, counters, outbox.source)
        reader = PageReader(store, codec, counters)
        self.follower = Follower(store, residents, outbox, reader, self.folder, learn, counters)
        self.lock = asyncio.Lock()
        self._residents = residents
        self._presence = presence
        self._evicted_at = time.monotonic()

    async def round(self) -> None:
        """One round with the store. Evicts memories also if that fails.

        Raises:
            MemoryStoreError: the store failed; the next round continues.
        """
        self.counters.polls += 1
        try:
            await self.follower.load()
            await self.pusher.push()
            await self.follower.follow()
            await self.folder.fold()
            await self._presence.note()
        except MemoryStoreError:
            self.follower.check_all = True
            raise
        finally:
            if time.monotonic() - self._evicted_at > _EVICT_SECONDS:
                self._evicted_at = time.monotonic()
                self._residents.evict(frozenset(self.outbox.pending_memories()))
