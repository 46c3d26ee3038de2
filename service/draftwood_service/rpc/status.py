"""StatusService and AuditService: what the server does now, and how its audits ended."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from importlib.metadata import version

from draftwood.admin.v1 import audit_pb2
from draftwood.admin.v1 import status_pb2 as pb
from draftwood_memory.counters import MemoryCounters
from draftwood_model_runner.errors import InvalidInputError
from draftwood_service.audit_counts import MARGIN_BOUNDS, AuditRecorder
from draftwood_service.auth import Principal, Role
from draftwood_service.engine.audits import AuditResult
from draftwood_service.engine.bridge import EngineBridge
from draftwood_service.engine.recovery import EngineRecovery
from draftwood_service.engine.reports import EngineReport, TenantReport, WorkCounts, WorkKey
from draftwood_service.errors import TooManyWatchesError
from draftwood_service.figures import MEMORY, WORK, status_fields
from draftwood_service.rpc.answers import Writer
from draftwood_service.rpc.calls import Call, Run, counted
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

    @property
    def methods(self) -> dict[str, Run]:
        """What answers each method of the service."""
        return {
            "GetStatus": self.get_status,
            "WatchStatus": self.watch_status,
        }

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
            report_time=datetime.now(UTC) - timedelta(seconds=age),
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
            **status_fields(WORK, work, pb.LoadStatus.DESCRIPTOR.fields_by_name),
            engine_restarts=self._recovery.restarts,
            drafting=[_drafting(key, counts) for key, counts in sorted(report.work.items())],
            sources=[
                pb.SourceStatus(source=source, draft_tokens=verified, accepted_tokens=accepted)
                for source, (verified, accepted) in sorted(work.by_source.items())
            ],
            accepted_by_depth=work.accepted_by_depth,
            store=_store(report.memory, report.store_healthy),
            audits=pb.AuditStatus(
                audited=sum(audit.audited for audit in audits),
                differing=sum(audit.differing for audit in audits),
                ties=sum(audit.ties for audit in audits),
                failed=sum(audit.failed for audit in audits),
            ),
            own_text_failed=report.own_text_failed,
        )


def _tenant(name: str, report: TenantReport) -> pb.TenantStatus:
    shown = status_fields(WORK, report.work, pb.TenantStatus.DESCRIPTOR.fields_by_name)
    return pb.TenantStatus(tenant=name, running=report.load.running, waiting=report.load.waiting, **shown)


def _drafting(key: WorkKey, counts: WorkCounts) -> pb.DraftingStatus:
    shown = status_fields(WORK, counts, pb.DraftingStatus.DESCRIPTOR.fields_by_name)
    return pb.DraftingStatus(strategy=key.strategy, arm=key.arm, **shown)


def _store(counters: MemoryCounters, healthy: bool) -> pb.StoreStatus:
    return pb.StoreStatus(up=healthy, **status_fields(MEMORY, counters, pb.StoreStatus.DESCRIPTOR.fields_by_name))


def _seconds(request: pb.WatchStatusRequest) -> float:
    """The interval that is asked for. Raises InvalidInputError."""
    if not request.HasField("interval"):
        return _DEFAULT_INTERVAL
    seconds = request.interval.seconds + request.interval.nanos / 1e9
    if not _MIN_INTERVAL <= seconds <= _MAX_INTERVAL:
        problem = f"must be {_MIN_INTERVAL:g} to {_MAX_INTERVAL:g} seconds"
        raise InvalidInputError("interval", f"{seconds:g} s", problem)
    return seconds


class AuditServicer:
    """The methods of AuditService.

    Args:
        share: of requests that are audited.
    """

    def __init__(self, recorder: AuditRecorder, recovery: EngineRecovery, share: float) -> None:
        self._recorder = recorder
        self._recovery = recovery
        self._share = share

    @property
    def methods(self) -> dict[str, Run]:
        """What answers each method of the service."""
        return {
            "GetAuditReport": self.get_audit_report,
        }

    async def get_audit_report(
        self, request: audit_pb2.GetAuditReportRequest, call: Call
    ) -> audit_pb2.GetAuditReportResponse:
        recorder, model = self._recorder, self._recorder.model
        return audit_pb2.GetAuditReportResponse(
            share=self._share,
            model=model.name,
            dtype=model.dtype,
            runner=model.runner_name,
            exact=model.exact,
            tie_bound=recorder.tie_bound,
            margin_bounds=MARGIN_BOUNDS,
            counts=[
                audit_pb2.AuditCounts(**key._asdict(), **asdict(counts))
                for key, counts in sorted(recorder.counts.items())
            ],
            differences=map(self._difference, recorder.differences),
            engine_restarts=self._recovery.restarts,
        )

    def _difference(self, result: AuditResult) -> audit_pb2.AuditDifference:
        assert result.difference is not None
        return audit_pb2.AuditDifference(
            detect_time=datetime.fromtimestamp(result.at, UTC),
            tenant=result.tenant,
            request_id=result.request_id,
            strategy=result.strategy,
            arm=result.arm,
            position=result.difference.position,
            margin=result.difference.margin,
            tie=self._recorder.is_tie(result.difference),
        )
