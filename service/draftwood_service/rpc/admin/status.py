"""StatusService: what the server does now, for operators and tenants' admins."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from importlib.metadata import version

from draftwood.admin.v1 import status_pb2 as pb
from draftwood_memory.counters import MemoryCounters
from draftwood_model_runner.errors import InvalidInputError
from draftwood_service.audits.recorder import AuditRecorder
from draftwood_service.auth import Principal, Role
from draftwood_service.engine.bridge import EngineBridge
from draftwood_service.engine.reporting.recovery import EngineRecovery
from draftwood_service.engine.reporting.report import EngineReport, TenantReport, WorkCounts, WorkKey
from draftwood_service.errors import TooManyWatchesError
from draftwood_service.rpc.calls import Call, counted
from draftwood_service.rpc.streaming.writer import Writer
from draftwood_service.settings import Settings

_MIN_INTERVAL, _DEFAULT_INTERVAL, _MAX_INTERVAL = 0.5, 1.0, 60.0
_LISTED_TENANTS = 100
_MAX_WATCHES = 16
"""Open WatchStatus calls of a tenant's callers, and of operators without a tenant."""


class StatusServicer:
    """The methods of StatusService.

    Args:
        recorder: counts audits, and knows the model.
        synced: set once it is known which tenants are configured.
    """

    def __init__(
        self,
        bridge: EngineBridge,
        recorder: AuditRecorder,
        recovery: EngineRecovery,
        synced: asyncio.Event,
        settings: Settings,
    ) -> None:
        self._bridge = bridge
        self._recorder = recorder
        self._recovery = recovery
        self._synced = synced
        self._settings = settings
        self._version = version("draftwood")
        self._started_at = time.monotonic()
        self._watches: Counter[str | None] = Counter()

    async def get_status(self, request: pb.GetStatusRequest, call: Call) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(status=self._status(call.principal))

    async def watch_status(self, request: pb.WatchStatusRequest, call: Call) -> None:
        """Streams samples for `max_timeout`, as long as any request: the credential is checked again after that."""
        interval = _seconds(request)
        end = time.monotonic() + self._settings.max_timeout
        if self._watches[call.principal.tenant] == _MAX_WATCHES:
            raise TooManyWatchesError(_MAX_WATCHES)
        with counted(self._watches, call.principal.tenant):
            async with Writer(call.context, self._settings.stall_timeout) as writer:
                while time.monotonic() < end:
                    await writer.write(pb.WatchStatusResponse(status=self._status(call.principal)))
                    await asyncio.sleep(interval)

    def _status(self, principal: Principal) -> pb.ServerStatus:
        reports, model = self._bridge.reports, self._recorder.model
        age = time.monotonic() - max(reports.at, self._started_at)
        status = pb.ServerStatus(
            time=datetime.now(UTC) - timedelta(seconds=age),
            server_version=self._version,
            model=model.name,
            dtype=model.dtype,
            runner=model.runner_name,
            state=self._state(),
            uptime=timedelta(seconds=max(reports.at - self._started_at, 0.0)),
        )
        tenants = reports.latest.tenants
        if principal.role is Role.OPERATOR:
            listed = [*tenants][-_LISTED_TENANTS:]
            status.load.CopyFrom(self._load(reports.latest))
        else:
            listed = [tenant for tenant in (principal.tenant,) if tenant in tenants]
        status.tenants.extend(_tenant(name, tenants[name]) for name in listed)
        return status

    def _state(self) -> pb.ServingState:
        if self._bridge.draining:
            return pb.SERVING_STATE_DRAINING
        if self._bridge.stopped:
            return pb.SERVING_STATE_RESTARTING
        return pb.SERVING_STATE_SERVING if self._synced.is_set() else pb.SERVING_STATE_CONFIGURATION_UNKNOWN

    def _load(self, report: EngineReport) -> pb.LoadStatus:
        work = WorkCounts()
        for counts in report.work.values():
            work = work.plus(counts)
        audits = self._recorder.counts.values()
        return pb.LoadStatus(
            running=report.load.running,
            waiting=report.load.waiting,
            max_running=self._settings.max_running,
            max_waiting=self._settings.max_waiting,
            kv_pages_used=report.kv.held,
            kv_pages_cached=report.kv.cached,
            kv_pages=report.kv.total,
            steps=report.engine.steps,
            busy=timedelta(seconds=report.engine.step_seconds),
            prompt_tokens=work.prompt_tokens - work.cached_prompt_tokens,
            cached_prompt_tokens=work.cached_prompt_tokens,
            tokens=work.written_tokens,
            decode_steps=work.decode_steps,
            preemptions=work.preemptions,
            engine_restarts=self._recovery.restarts,
            draft_tokens=work.draft_tokens,
            drafting=[_drafting(key, counts) for key, counts in sorted(report.work.items())],
            sources=[
                pb.SourceStatus(source=source, draft_tokens=verified, accepted_tokens=accepted)
                for source, (verified, accepted) in sorted(work.by_source.items())
            ],
            accepted_by_depth=work.accepted_by_depth,
            store=_store(report.memory, report.store_healthy),
            audits=pb.AuditStatus(
                audited=sum(one.audited for one in audits),
                differing=sum(one.differing for one in audits),
                ties=sum(one.ties for one in audits),
                failed=sum(one.failed for one in audits),
            ),
            own_text_failed=report.own_text_failed,
        )


def _tenant(name: str, report: TenantReport) -> pb.TenantStatus:
    return pb.TenantStatus(
        tenant=name,
        running=report.load.running,
        waiting=report.load.waiting,
        tokens=report.work.written_tokens,
        decode_steps=report.work.decode_steps,
        draft_tokens=report.work.draft_tokens,
        accepted_tokens=report.work.accepted_tokens,
    )


def _drafting(key: WorkKey, counts: WorkCounts) -> pb.DraftingStatus:
    return pb.DraftingStatus(
        strategy=key.strategy,
        arm=key.arm,
        requests=counts.sequences,
        tokens=counts.written_tokens,
        decode_steps=counts.decode_steps,
        draft_tokens=counts.draft_tokens,
        accepted_tokens=counts.accepted_tokens,
        draft_time=timedelta(seconds=counts.draft_seconds),
        disabled=counts.disabled,
    )


def _store(counters: MemoryCounters, healthy: bool) -> pb.StoreStatus:
    return pb.StoreStatus(
        up=healthy,
        lag=timedelta(seconds=counters.last_lag),
        pending_records=counters.outbox_records,
        dropped_records=counters.dropped,
        late_memories=counters.late,
        memories=counters.tenants,
        memory_tokens=counters.tokens,
        memory_bytes=counters.resident_bytes,
    )


def _seconds(request: pb.WatchStatusRequest) -> float:
    """The interval that is asked for. Raises InvalidInputError."""
    if not request.HasField("interval"):
        return _DEFAULT_INTERVAL
    seconds = request.interval.seconds + request.interval.nanos / 1e9
    if not _MIN_INTERVAL <= seconds <= _MAX_INTERVAL:
        problem = f"must be {_MIN_INTERVAL:g} to {_MAX_INTERVAL:g} seconds"
        raise InvalidInputError("interval", f"{seconds:g} s", problem)
    return seconds
