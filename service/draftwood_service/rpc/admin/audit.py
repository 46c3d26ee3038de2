"""AuditService: the counts of the losslessness audit, for operators."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime

from draftwood.admin.v1 import audit_pb2 as pb
from draftwood_service.audits.recorder import MARGIN_BOUNDS, AuditRecorder
from draftwood_service.audits.results import AuditResult
from draftwood_service.engine.reporting.recovery import EngineRecovery
from draftwood_service.rpc.calls import Call


class AuditServicer:
    """The methods of AuditService.

    Args:
        share: of requests that are audited.
    """

    def __init__(self, recorder: AuditRecorder, recovery: EngineRecovery, share: float) -> None:
        self._recorder = recorder
        self._recovery = recovery
        self._share = share

    async def get_audit_report(self, request: pb.GetAuditReportRequest, call: Call) -> pb.GetAuditReportResponse:
        recorder, model = self._recorder, self._recorder.model
        return pb.GetAuditReportResponse(
            share=self._share,
            model=model.name,
            dtype=model.dtype,
            runner=model.runner_name,
            exact=model.exact,
            tie_bound=recorder.tie_bound,
            margin_bounds=MARGIN_BOUNDS,
            counts=[
                pb.AuditCounts(**key._asdict(), **asdict(counts)) for key, counts in sorted(recorder.counts.items())
            ],
            differences=map(self._difference, recorder.differences),
            engine_restarts=self._recovery.restarts,
        )

    def _difference(self, result: AuditResult) -> pb.AuditDifference:
        assert result.difference is not None
        return pb.AuditDifference(
            time=datetime.fromtimestamp(result.at, UTC),
            tenant=result.tenant,
            request_id=result.request_id,
            strategy=result.strategy,
            arm=result.arm,
            position=result.difference.position,
            margin=result.difference.margin,
            tie=self._recorder.is_tie(result.difference),
        )
