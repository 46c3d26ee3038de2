"""The administrative services of a server, with the resources that they serve."""

from __future__ import annotations

import asyncio
from pathlib import Path

from draftwood_memory.store.redis_client import RedisClient
from draftwood_service.live_experiments.live import LiveExperiments
from draftwood_service.live_experiments.stopping import GuardrailStops
from draftwood_service.rpc.admin import experiments, tenants
from draftwood_service.rpc.calls import Method
from draftwood_service.settings import Settings
from draftwood_service.store_client import store_client, store_keys
from draftwood_service.tenant_limits import tenant_limits
from draftwood_tenants.catalog import Catalog
from draftwood_tenants.experiments.store.base import CountStore
from draftwood_tenants.experiments.store.in_process import InProcessCounts
from draftwood_tenants.experiments.store.redis_counts import RedisCounts
from draftwood_tenants.file import SETTING, read_content
from draftwood_tenants.followed_file import FollowedFile
from draftwood_tenants.resources.ending import end
from draftwood_tenants.resources.follower import ResourceFollower
from draftwood_tenants.resources.in_process import InProcessResources
from draftwood_tenants.resources.redis_resources import RedisResources
from draftwood_tenants.resources.remembered import Remembered
from draftwood_tenants.resources.sealing import Seal


class Administration:
    """Tenants and experiments of a server.

    Attributes:
        catalog: what is known of them.
        known: set once it is known which tenants are configured.
        experiments: on live requests.

    Args:
        replica: names this server among those on the store.
        memories: runs operations on the memories of arms.

    Raises:
        InvalidInputError: the tenants file cannot be read, or is wrong.
    """

    def __init__(self, settings: Settings, replica: str, memories: experiments.Memories) -> None:
        limits = tenant_limits(settings)
        path = settings.tenants_file
        self._file = None if path is None else FollowedFile(SETTING, path, lambda data: read_content(data, limits))
        client, seal = store_client(settings), Seal(store_keys(settings))
        self._stored = _follower(client, seal, settings.cache_folder)
        self._following: asyncio.Task[None] | None = None
        self.catalog = Catalog(self._stored, self._file, limits)
        counts: CountStore = InProcessCounts() if client is None else RedisCounts(client, seal)
        stops = GuardrailStops(self._stored, self.catalog)
        self.experiments = LiveExperiments(counts, self.catalog, replica, stops.stop)
        self.known = self._stored.known
        self._servicers = (
            tenants.TenantServicer(self._stored, self.catalog, limits),
            experiments.ExperimentServicer(self._stored, self.catalog, limits, self.experiments, memories),
        )

    @property
    def methods(self) -> list[dict[str, Method]]:
        """Of TenantService and ExperimentService."""
        return [servicer.methods for servicer in self._servicers]

    async def start(self) -> None:
        """Reads what is stored, and follows it and the file."""
        if self._file is not None:
            self._following = asyncio.create_task(self._file.follow())
        await self._stored.start()
        self.experiments.start()

    async def close(self) -> None:
        """Writes what is counted, and ends following."""
        await self.experiments.close()
        await end([self._following])
        await self._stored.close()


def _follower(client: RedisClient | None, seal: Seal, folder: Path | None) -> ResourceFollower:
    if client is None:
        return ResourceFollower(InProcessResources())
    remembered = None if folder is None else Remembered(folder, client.identity)
    return ResourceFollower(RedisResources(client, seal), remembered)
