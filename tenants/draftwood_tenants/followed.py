"""Tenants and experiments as a process follows them: a file, and the store that its settings name."""

from __future__ import annotations

import asyncio
from pathlib import Path

from draftwood_memory.store.encryption import KeyRing
from draftwood_memory.store.redis_client import RedisClient
from draftwood_tenants.catalog import Catalog
from draftwood_tenants.experiments.store import CountStore, InProcessCounts, RedisCounts
from draftwood_tenants.file import SETTING, read_content
from draftwood_tenants.followed_file import FollowedFile
from draftwood_tenants.reading import ServerLimits
from draftwood_tenants.resources.follower import PresenceNote, ResourceFollower, end
from draftwood_tenants.resources.redis import RedisResources, ResourceCipher
from draftwood_tenants.resources.store import InProcessResources


class FollowedTenants:
    """Tenants and experiments. For one event loop.

    Attributes:
        stored: what is in the store.
        catalog: what is known of them.
        counts: of experiments.

    Args:
        client: of the store, closed with this; None keeps what is made in this process.
        keys: hide names and encrypt values; None for neither.
        file: of tenants; None without one.
        folder: where it is noted for later processes whether the store has any; None for nowhere.

    Raises:
        InvalidInputError: the file cannot be read, or is wrong.
    """

    def __init__(
        self,
        client: RedisClient | None,
        keys: KeyRing | None,
        file: Path | None,
        folder: Path | None,
        limits: ServerLimits,
    ) -> None:
        self._file = None if file is None else FollowedFile(SETTING, file, lambda data: read_content(data, limits))
        cipher = ResourceCipher(keys)
        self.counts: CountStore = InProcessCounts() if client is None else RedisCounts(client, cipher)
        if client is None:
            self.stored = ResourceFollower(InProcessResources())
        else:
            presence_note = None if folder is None else PresenceNote(folder, client.identity)
            self.stored = ResourceFollower(RedisResources(client, cipher), presence_note)
        self.catalog = Catalog(self.stored, self._file, limits)
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Reads what is stored, and follows it and the file. A store that does not answer is no error."""
        if self._file is not None:
            self._following = asyncio.create_task(self._file.follow())
        await self.stored.start()

    async def close(self) -> None:
        """Ends following, and the store's connections."""
        await end([self._following])
        await self.stored.close()
