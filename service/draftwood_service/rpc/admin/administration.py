"""The administrative services of a server, with the resources that they serve."""

from __future__ import annotations

from functools import partial

from draftwood_service.experiments.live import LiveExperiments
from draftwood_service.experiments.stopping import stop_arms
from draftwood_service.rpc.admin import experiments, tenants
from draftwood_service.settings import Settings
from draftwood_service.store_client import store_client, store_keys
from draftwood_tenants.followed import FollowedTenants


class Administration:
    """Tenants and experiments of a server.

    Attributes:
        catalog: what is known of them.
        known: set once it is known which tenants are configured.
        experiments: on live requests.
        tenants, experiment_service: TenantService and ExperimentService.

    Args:
        replica: names this server among those on the store.
        memories: runs operations on the memories of arms.

    Raises:
        InvalidInputError: the tenants file cannot be read, or is wrong.
    """

    def __init__(self, settings: Settings, replica: str, memories: experiments.Memories) -> None:
        limits = settings.tenant_limits
        client, keys = store_client(settings), store_keys(settings)
        self._followed = FollowedTenants(client, keys, settings.tenants_file, settings.cache_folder, limits)
        stored, self.catalog = self._followed.stored, self._followed.catalog
        stop = partial(stop_arms, stored, self.catalog)
        self.experiments = LiveExperiments(self._followed.counts, self.catalog, replica, stop)
        self.known = stored.known
        self.tenants = tenants.TenantServicer(stored, self.catalog, limits)
        self.experiment_service = experiments.ExperimentServicer(
            stored, self.catalog, limits, self.experiments, memories
        )

    async def start(self) -> None:
        """Reads what is stored, and follows it and the file."""
        await self._followed.start()
        self.experiments.start()

    async def close(self) -> None:
        """Writes what is counted, and ends following."""
        await self.experiments.close()
        await self._followed.close()
