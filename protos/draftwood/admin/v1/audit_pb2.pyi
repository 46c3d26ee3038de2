import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetAuditReportRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetAuditReportResponse(_message.Message):
    __slots__ = ("share", "model", "dtype", "runner", "exact", "tie_bound", "margin_bounds", "counts", "differences", "engine_restarts")
    SHARE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    TIE_BOUND_FIELD_NUMBER: _ClassVar[int]
    MARGIN_BOUNDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    ENGINE_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    share: float
    model: str
    dtype: str
    runner: str
    exact: bool
    tie_bound: float
    margin_bounds: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedCompositeFieldContainer[AuditCounts]
    differences: _containers.RepeatedCompositeFieldContainer[AuditDifference]
    engine_restarts: int
    def __init__(self, share: _Optional[float] = ..., model: _Optional[str] = ..., dtype: _Optional[str] = ..., runner: _Optional[str] = ..., exact: bool = ..., tie_bound: _Optional[float] = ..., margin_bounds: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[_Union[AuditCounts, _Mapping]]] = ..., differences: _Optional[_Iterable[_Union[AuditDifference, _Mapping]]] = ..., engine_restarts: _Optional[int] = ...) -> None: ...

class AuditCounts(_message.Message):
    __slots__ = ("strategy", "arm", "audited", "tokens", "differing", "ties", "dropped", "failed", "margins", "largest_margin")
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    ARM_FIELD_NUMBER: _ClassVar[int]
    AUDITED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIFFERING_FIELD_NUMBER: _ClassVar[int]
    TIES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    MARGINS_FIELD_NUMBER: _ClassVar[int]
    LARGEST_MARGIN_FIELD_NUMBER: _ClassVar[int]
    strategy: str
    arm: str
    audited: int
    tokens: int
    differing: int
    ties: int
    dropped: int
    failed: int
    margins: _containers.RepeatedScalarFieldContainer[int]
    largest_margin: float
    def __init__(self, strategy: _Optional[str] = ..., arm: _Optional[str] = ..., audited: _Optional[int] = ..., tokens: _Optional[int] = ..., differing: _Optional[int] = ..., ties: _Optional[int] = ..., dropped: _Optional[int] = ..., failed: _Optional[int] = ..., margins: _Optional[_Iterable[int]] = ..., largest_margin: _Optional[float] = ...) -> None: ...

class AuditDifference(_message.Message):
    __slots__ = ("detect_time", "tenant", "request_id", "strategy", "arm", "position", "margin", "tie")
    DETECT_TIME_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    ARM_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    MARGIN_FIELD_NUMBER: _ClassVar[int]
    TIE_FIELD_NUMBER: _ClassVar[int]
    detect_time: _timestamp_pb2.Timestamp
    tenant: str
    request_id: str
    strategy: str
    arm: str
    position: int
    margin: float
    tie: bool
    def __init__(self, detect_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., tenant: _Optional[str] = ..., request_id: _Optional[str] = ..., strategy: _Optional[str] = ..., arm: _Optional[str] = ..., position: _Optional[int] = ..., margin: _Optional[float] = ..., tie: bool = ...) -> None: ...
