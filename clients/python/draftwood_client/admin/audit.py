"""The losslessness audit as plain values; fields as in the protocol."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class AuditCounts:
    """The audits of one strategy in one arm; fields as in the protocol."""

    strategy: str
    arm: str
    audited: int
    tokens: int
    differing: int
    ties: int
    dropped: int
    failed: int
    margins: tuple[int, ...]
    largest_margin: float


@dataclass(frozen=True, slots=True)
class AuditDifference:
    """The first token of an answer that differs; fields as in the protocol."""

    time: datetime
    tenant: str
    request_id: str
    strategy: str
    arm: str
    position: int
    margin: float
    tie: bool


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What the audits of a server found since its start; fields as in the protocol."""

    share: float
    model: str
    dtype: str
    runner: str
    exact: bool
    tie_bound: float
    margin_bounds: tuple[float, ...]
    counts: tuple[AuditCounts, ...]
    differences: tuple[AuditDifference, ...]
    engine_restarts: int
