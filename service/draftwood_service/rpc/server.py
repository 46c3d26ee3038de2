"""The server of a model: serving, draining, stopped."""

from __future__ import annotations

import asyncio
import socket
import time
from functools import partial
from typing import Any

import structlog
from grpc_health.v1 import health_pb2

from draftwood_memory.settings import store_client, store_keys
from draftwood_service.audit_counts import AuditRecorder
from draftwood_service.engine.audits import AuditOutcome, AuditResult
from draftwood_service.engine.bridge import EngineBridge
from draftwood_service.engine.recovery import EngineRecovery, follow_liveness
from draftwood_service.errors import ShuttingDownError
from draftwood_service.experiments.live import LiveExperiments
from draftwood_service.experiments.watch import stop_arms
from draftwood_service.quotas.shared import opened_limiter
from draftwood_service.rpc.bound import STOP_SECONDS, BoundServer
from draftwood_service.rpc.calls import Call, Run
from draftwood_service.rpc.experiments import ExperimentServicer
from draftwood_service.rpc.generation import GenerationServicer
from draftwood_service.rpc.memory import MemoryServicer
from draftwood_service.rpc.status import AuditServicer, StatusServicer
from draftwood_service.rpc.tenants import TenantServicer
from draftwood_service.rpc.vllm_engine import VllmEngineServicer
from draftwood_service.serving import ServedModel, Serving
from draftwood_strategies.drafting import require_strategy
from draftwood_strategies.registry import know_offered
from draftwood_tenants.followed import FollowedTenants
from draftwood_tenants.resources.follower import end
from draftwood_tenants.resources.store import ConfigurationUnknownError

_log = structlog.get_logger(__name__)

_STREAMS_SHARE = 0.75
"""The part of the grace in which live calls may finish; the rest is for their status and the end of the engine."""
_BEFORE_GOAWAY = 0.1
"""The share of that time between NOT_SERVING and GOAWAY. A call that arrives in the moment of GOAWAY ends with
CANCELLED, by gRPC itself: until then clients that watch health have gone, and others are refused with UNAVAILABLE."""
_STATUS_SECONDS = 1.0
"""For cut-off streams to send their status."""
_MIN_ENGINE_SECONDS = 1.0
"""For the engine to end by itself, however little is left of the grace."""


class RunningServer:
    """Serves a model until it is stopped.

    Attributes:
        recovery: restarts an engine that has died; once it has failed, the service stops.
        audits: the counts of the losslessness audit, for metrics and experiments.
        gate: counts the calls that it refused.
        limiter: of requests, by their tenants' quotas.
        serving: what health says.
        synced: set once it is known which tenants are configured: before, nothing is served.
        slots: requests that can run at once.
        tenants: and experiments, as configured.
        experiments: on live requests.

    Args:
        bridge: to the engine of this model, started. The server closes it.

    Raises:
        InvalidValueError: the settings name a strategy whose model was not loaded.
        InvalidInputError: the tenants file cannot be read, or is wrong.
    """

    def __init__(self, bound: BoundServer, model: ServedModel, bridge: EngineBridge) -> None:
        settings = bound.settings
        know_offered([drafter.strategy for drafter in model.draft_models])
        require_strategy("strategy", settings.strategy)
        self.address, self.port, self.health_port = bound.address, bound.port, bound.health_port
        self._settings = settings
        self._bound = bound
        self.model = model
        self.gate = bound.gate
        self.slots = settings.max_running
        self.serving = False
        self._stopping: asyncio.Task[None] | None = None
        self._becoming_ready: asyncio.Task[None] | None = None
        self._liveness: asyncio.Task[None] | None = None
        self.bridge = bridge
        self.recovery = EngineRecovery(bridge, settings.engine_restarts, self._set_serving)
        self.tenants = FollowedTenants(
            store_client(settings.of_memory),
            store_keys(settings.of_memory),
            settings.tenants_file,
            settings.cache_folder,
            settings.tenant_limits,
        )
        stored, catalog = self.tenants.stored, self.tenants.catalog
        self.synced = stored.synced
        replica = f"{socket.gethostname()}:{self.port}"
        self.experiments = LiveExperiments(self.tenants.counts, catalog, replica, partial(stop_arms, stored, catalog))
        self.limiter = opened_limiter(settings)
        self.audits = AuditRecorder(model)
        bridge.weight_of = self._weight_of
        bridge.on_audited = self._audited
        self._generation = GenerationServicer(
            Serving(model, settings), bridge, self.limiter, catalog.config_of, self.experiments
        )
        self._serve_all()
        bound.telemetry.watch(self)

    def _serve_all(self) -> None:
        """Lets the bound port answer the calls of all services."""
        settings, bridge, limits = self._settings, self.bridge, self._settings.tenant_limits
        stored, catalog = self.tenants.stored, self.tenants.catalog
        memory = MemoryServicer(
            bridge, self.model, settings, catalog.config_of, lambda tenant: catalog.tenant_message(tenant) is not None
        )
        audit = AuditServicer(self.audits, self.recovery, settings.audit_share)
        status = StatusServicer(bridge, self.audits, self.recovery, self.synced, settings)
        experiments = ExperimentServicer(stored, catalog, limits, self.experiments, bridge.run_operation)
        serve = self._bound.serve
        serve("draftwood.v1.GenerationService", self._generation.methods)
        engine = VllmEngineServicer(self._generation, Serving(self.model, settings), bridge, lambda: self.serving)
        serve("vllm.grpc.engine.VllmEngine", engine.methods)
        serve("draftwood.v1.MemoryService", {name: self._counted(run) for name, run in memory.methods.items()})
        serve("draftwood.admin.v1.AuditService", audit.methods)
        serve("draftwood.admin.v1.StatusService", status.methods)
        serve("draftwood.admin.v1.TenantService", TenantServicer(stored, catalog, limits).methods)
        serve("draftwood.admin.v1.ExperimentService", experiments.methods)

    async def start(self) -> None:
        """Starts serving."""
        self.limiter.start()
        await self._bound.start()
        await self.tenants.start()
        self.experiments.start()
        following = follow_liveness(self.bridge, self._settings.engine_stall_timeout, self._bound.set_alive)
        self._liveness = asyncio.create_task(following)
        if self.synced.is_set():
            await self._set_serving(not self.bridge.stopped)
        else:
            self._becoming_ready = asyncio.create_task(self._serve_once_synced())

    async def stop(self, grace: float | None = None) -> None:
        """Drains and stops; further calls wait for the same stop.

        Health becomes NOT_SERVING, new requests end with UNAVAILABLE, as do those that wait and would not end in time,
        and a little later the port is closed and clients are told to go elsewhere (GOAWAY). Other requests, and calls
        to MemoryService, may finish or end so as well; then what is counted is written, and the engine is closed. All
        of it takes `grace` seconds at most (None: the settings' `drain_grace`), and one more for an engine that does
        not end.
        """
        if self._stopping is None:
            seconds = self._settings.drain_grace if grace is None else grace
            self._stopping = asyncio.create_task(self._stop(seconds))
        await asyncio.shield(self._stopping)

    async def _serve_once_synced(self) -> None:
        """Requests of tenants that may have a configuration are refused until then."""
        await self.synced.wait()
        await self._set_serving(not self.bridge.stopped)

    async def _stop(self, grace: float) -> None:
        await end([self._becoming_ready])
        await self._set_serving(False)
        await self.recovery.close()
        await self._set_serving(False)  # also if the engine was just restarted
        self.bridge.drain(_STREAMS_SHARE * grace)
        _log.info("draining", live=self.bridge.live, grace_seconds=grace)
        deadline = time.monotonic() + grace
        idle = await self.bridge.wait_idle(_BEFORE_GOAWAY * grace)
        closing = asyncio.create_task(self._bound.grpc_server.stop(STOP_SECONDS if idle else grace))
        if not await self.bridge.wait_idle((_STREAMS_SHARE - _BEFORE_GOAWAY) * grace):
            _log.warning("drain grace is over", aborted=self.bridge.live)
            self.bridge.fail_live(ShuttingDownError)
            await self.bridge.wait_idle(_STATUS_SECONDS)
        await asyncio.gather(self._bound.close(), closing)
        await end([self._liveness])
        await self.experiments.close()
        await self.tenants.close()
        await self.limiter.close()
        await self.bridge.close(max(deadline - time.monotonic(), _MIN_ENGINE_SECONDS))  # ends an embedded store
        self._generation.close()
        await self._bound.telemetry.close()
        _log.info("stopped")

    def _weight_of(self, tenant: str) -> float:
        try:
            weight = self.tenants.catalog.config_of(tenant).weight
        except ConfigurationUnknownError:
            weight = None
        return self._settings.tenant_weights.get(tenant, 1.0) if weight is None else weight

    def _audited(self, result: AuditResult) -> None:
        """Counts it, in experiments too. Ties are no difference: rounding explains them, in every arm."""
        self.audits.record(result)
        if result.outcome in (AuditOutcome.SAME, AuditOutcome.DIFFERENT):
            differing = result.difference is not None and not self.audits.is_tie(result.difference)
            self.experiments.count_audit(result.tenant, result.arm, result.request_id, differing=differing)

    async def _set_serving(self, serving: bool) -> None:
        self.serving = serving = serving and self.synced.is_set()
        answer = health_pb2.HealthCheckResponse
        await self._bound.set_health(answer.SERVING if serving else answer.NOT_SERVING)

    def _counted(self, run: Run) -> Run:
        """The same method, as a call that a drain waits for."""

        async def counted(request: Any, call: Call) -> Any:
            with self.bridge.other_call():
                return await run(request, call)

        return counted
