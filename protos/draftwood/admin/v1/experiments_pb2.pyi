import datetime

from draftwood.admin.v1 import tenants_pb2 as _tenants_pb2
from google.api import field_behavior_pb2 as _field_behavior_pb2
from google.api import resource_pb2 as _resource_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import empty_pb2 as _empty_pb2
from google.protobuf import field_mask_pb2 as _field_mask_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExperimentState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXPERIMENT_STATE_UNSPECIFIED: _ClassVar[ExperimentState]
    EXPERIMENT_STATE_DRAFT: _ClassVar[ExperimentState]
    EXPERIMENT_STATE_RUNNING: _ClassVar[ExperimentState]
    EXPERIMENT_STATE_STOPPED: _ClassVar[ExperimentState]
    EXPERIMENT_STATE_CONCLUDED: _ClassVar[ExperimentState]

class ExperimentUnit(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXPERIMENT_UNIT_UNSPECIFIED: _ClassVar[ExperimentUnit]
    EXPERIMENT_UNIT_REQUEST: _ClassVar[ExperimentUnit]
    EXPERIMENT_UNIT_SESSION: _ClassVar[ExperimentUnit]

class ArmMemory(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ARM_MEMORY_UNSPECIFIED: _ClassVar[ArmMemory]
    ARM_MEMORY_EMPTY: _ClassVar[ArmMemory]
    ARM_MEMORY_FORKED: _ClassVar[ArmMemory]

class ConclusionKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONCLUSION_KIND_UNSPECIFIED: _ClassVar[ConclusionKind]
    CONCLUSION_KIND_NOTE: _ClassVar[ConclusionKind]
    CONCLUSION_KIND_GUARDRAIL: _ClassVar[ConclusionKind]
    CONCLUSION_KIND_ARM_STOPPED: _ClassVar[ConclusionKind]
    CONCLUSION_KIND_SAMPLE_RATIO_MISMATCH: _ClassVar[ConclusionKind]
    CONCLUSION_KIND_COUNTS_MISSING: _ClassVar[ConclusionKind]
    CONCLUSION_KIND_NO_ARM_LEFT: _ClassVar[ConclusionKind]
    CONCLUSION_KIND_TOO_EARLY: _ClassVar[ConclusionKind]
    CONCLUSION_KIND_NOT_COMPARABLE: _ClassVar[ConclusionKind]
    CONCLUSION_KIND_NO_DIFFERENCE: _ClassVar[ConclusionKind]
    CONCLUSION_KIND_FASTER: _ClassVar[ConclusionKind]
    CONCLUSION_KIND_SLOWER: _ClassVar[ConclusionKind]

class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERDICT_UNSPECIFIED: _ClassVar[Verdict]
    VERDICT_OPEN: _ClassVar[Verdict]
    VERDICT_BETTER: _ClassVar[Verdict]
    VERDICT_WORSE: _ClassVar[Verdict]
EXPERIMENT_STATE_UNSPECIFIED: ExperimentState
EXPERIMENT_STATE_DRAFT: ExperimentState
EXPERIMENT_STATE_RUNNING: ExperimentState
EXPERIMENT_STATE_STOPPED: ExperimentState
EXPERIMENT_STATE_CONCLUDED: ExperimentState
EXPERIMENT_UNIT_UNSPECIFIED: ExperimentUnit
EXPERIMENT_UNIT_REQUEST: ExperimentUnit
EXPERIMENT_UNIT_SESSION: ExperimentUnit
ARM_MEMORY_UNSPECIFIED: ArmMemory
ARM_MEMORY_EMPTY: ArmMemory
ARM_MEMORY_FORKED: ArmMemory
CONCLUSION_KIND_UNSPECIFIED: ConclusionKind
CONCLUSION_KIND_NOTE: ConclusionKind
CONCLUSION_KIND_GUARDRAIL: ConclusionKind
CONCLUSION_KIND_ARM_STOPPED: ConclusionKind
CONCLUSION_KIND_SAMPLE_RATIO_MISMATCH: ConclusionKind
CONCLUSION_KIND_COUNTS_MISSING: ConclusionKind
CONCLUSION_KIND_NO_ARM_LEFT: ConclusionKind
CONCLUSION_KIND_TOO_EARLY: ConclusionKind
CONCLUSION_KIND_NOT_COMPARABLE: ConclusionKind
CONCLUSION_KIND_NO_DIFFERENCE: ConclusionKind
CONCLUSION_KIND_FASTER: ConclusionKind
CONCLUSION_KIND_SLOWER: ConclusionKind
VERDICT_UNSPECIFIED: Verdict
VERDICT_OPEN: Verdict
VERDICT_BETTER: Verdict
VERDICT_WORSE: Verdict

class Experiment(_message.Message):
    __slots__ = ("name", "description", "etag", "create_time", "update_time", "origin", "arms", "coverage", "unit", "tenants", "burn_in", "alpha", "guardrails", "state", "start_time", "end_time", "salt", "winner", "stopped_arms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    UPDATE_TIME_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    ARMS_FIELD_NUMBER: _ClassVar[int]
    COVERAGE_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    BURN_IN_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    GUARDRAILS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    WINNER_FIELD_NUMBER: _ClassVar[int]
    STOPPED_ARMS_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    etag: str
    create_time: _timestamp_pb2.Timestamp
    update_time: _timestamp_pb2.Timestamp
    origin: _tenants_pb2.ResourceOrigin
    arms: _containers.RepeatedCompositeFieldContainer[ExperimentArm]
    coverage: float
    unit: ExperimentUnit
    tenants: _containers.RepeatedScalarFieldContainer[str]
    burn_in: _duration_pb2.Duration
    alpha: float
    guardrails: ExperimentGuardrails
    state: ExperimentState
    start_time: _timestamp_pb2.Timestamp
    end_time: _timestamp_pb2.Timestamp
    salt: str
    winner: str
    stopped_arms: _containers.RepeatedCompositeFieldContainer[StoppedArm]
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., etag: _Optional[str] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., update_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., origin: _Optional[_Union[_tenants_pb2.ResourceOrigin, str]] = ..., arms: _Optional[_Iterable[_Union[ExperimentArm, _Mapping]]] = ..., coverage: _Optional[float] = ..., unit: _Optional[_Union[ExperimentUnit, str]] = ..., tenants: _Optional[_Iterable[str]] = ..., burn_in: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., alpha: _Optional[float] = ..., guardrails: _Optional[_Union[ExperimentGuardrails, _Mapping]] = ..., state: _Optional[_Union[ExperimentState, str]] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., end_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., salt: _Optional[str] = ..., winner: _Optional[str] = ..., stopped_arms: _Optional[_Iterable[_Union[StoppedArm, _Mapping]]] = ...) -> None: ...

class ExperimentArm(_message.Message):
    __slots__ = ("id", "drafting", "weight", "memory")
    ID_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    id: str
    drafting: _tenants_pb2.DraftConfig
    weight: float
    memory: ArmMemory
    def __init__(self, id: _Optional[str] = ..., drafting: _Optional[_Union[_tenants_pb2.DraftConfig, _Mapping]] = ..., weight: _Optional[float] = ..., memory: _Optional[_Union[ArmMemory, str]] = ...) -> None: ...

class ExperimentGuardrails(_message.Message):
    __slots__ = ("slower_ttft", "differing", "report_only")
    SLOWER_TTFT_FIELD_NUMBER: _ClassVar[int]
    DIFFERING_FIELD_NUMBER: _ClassVar[int]
    REPORT_ONLY_FIELD_NUMBER: _ClassVar[int]
    slower_ttft: float
    differing: float
    report_only: bool
    def __init__(self, slower_ttft: _Optional[float] = ..., differing: _Optional[float] = ..., report_only: bool = ...) -> None: ...

class StoppedArm(_message.Message):
    __slots__ = ("arm", "guardrail", "reason", "stop_time")
    ARM_FIELD_NUMBER: _ClassVar[int]
    GUARDRAIL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TIME_FIELD_NUMBER: _ClassVar[int]
    arm: str
    guardrail: str
    reason: str
    stop_time: _timestamp_pb2.Timestamp
    def __init__(self, arm: _Optional[str] = ..., guardrail: _Optional[str] = ..., reason: _Optional[str] = ..., stop_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class GetExperimentRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListExperimentsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListExperimentsResponse(_message.Message):
    __slots__ = ("experiments", "next_page_token")
    EXPERIMENTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    experiments: _containers.RepeatedCompositeFieldContainer[Experiment]
    next_page_token: str
    def __init__(self, experiments: _Optional[_Iterable[_Union[Experiment, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class CreateExperimentRequest(_message.Message):
    __slots__ = ("experiment_id", "experiment", "validate_only")
    EXPERIMENT_ID_FIELD_NUMBER: _ClassVar[int]
    EXPERIMENT_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    experiment_id: str
    experiment: Experiment
    validate_only: bool
    def __init__(self, experiment_id: _Optional[str] = ..., experiment: _Optional[_Union[Experiment, _Mapping]] = ..., validate_only: bool = ...) -> None: ...

class UpdateExperimentRequest(_message.Message):
    __slots__ = ("experiment", "update_mask", "validate_only")
    EXPERIMENT_FIELD_NUMBER: _ClassVar[int]
    UPDATE_MASK_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    experiment: Experiment
    update_mask: _field_mask_pb2.FieldMask
    validate_only: bool
    def __init__(self, experiment: _Optional[_Union[Experiment, _Mapping]] = ..., update_mask: _Optional[_Union[_field_mask_pb2.FieldMask, _Mapping]] = ..., validate_only: bool = ...) -> None: ...

class DeleteExperimentRequest(_message.Message):
    __slots__ = ("name", "etag", "allow_missing", "validate_only")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    ALLOW_MISSING_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    allow_missing: bool
    validate_only: bool
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ..., allow_missing: bool = ..., validate_only: bool = ...) -> None: ...

class StartExperimentRequest(_message.Message):
    __slots__ = ("name", "etag", "validate_only")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    validate_only: bool
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ..., validate_only: bool = ...) -> None: ...

class StopExperimentRequest(_message.Message):
    __slots__ = ("name", "etag", "validate_only")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    validate_only: bool
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ..., validate_only: bool = ...) -> None: ...

class ConcludeExperimentRequest(_message.Message):
    __slots__ = ("name", "etag", "winner", "keep_tenants", "validate_only")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    WINNER_FIELD_NUMBER: _ClassVar[int]
    KEEP_TENANTS_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    winner: str
    keep_tenants: bool
    validate_only: bool
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ..., winner: _Optional[str] = ..., keep_tenants: bool = ..., validate_only: bool = ...) -> None: ...

class GetExperimentReportRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ExperimentReport(_message.Message):
    __slots__ = ("experiment", "report_time", "servers", "metrics", "arms", "comparisons", "sample_ratio_mismatch", "violations", "conclusions", "history", "better_arm")
    EXPERIMENT_FIELD_NUMBER: _ClassVar[int]
    REPORT_TIME_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    ARMS_FIELD_NUMBER: _ClassVar[int]
    COMPARISONS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_RATIO_MISMATCH_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    CONCLUSIONS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    BETTER_ARM_FIELD_NUMBER: _ClassVar[int]
    experiment: Experiment
    report_time: _timestamp_pb2.Timestamp
    servers: int
    metrics: _containers.RepeatedCompositeFieldContainer[Metric]
    arms: _containers.RepeatedCompositeFieldContainer[ArmRow]
    comparisons: _containers.RepeatedCompositeFieldContainer[ArmComparison]
    sample_ratio_mismatch: bool
    violations: _containers.RepeatedCompositeFieldContainer[StoppedArm]
    conclusions: _containers.RepeatedCompositeFieldContainer[Conclusion]
    history: _containers.RepeatedCompositeFieldContainer[ReportPoint]
    better_arm: str
    def __init__(self, experiment: _Optional[_Union[Experiment, _Mapping]] = ..., report_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., servers: _Optional[int] = ..., metrics: _Optional[_Iterable[_Union[Metric, _Mapping]]] = ..., arms: _Optional[_Iterable[_Union[ArmRow, _Mapping]]] = ..., comparisons: _Optional[_Iterable[_Union[ArmComparison, _Mapping]]] = ..., sample_ratio_mismatch: bool = ..., violations: _Optional[_Iterable[_Union[StoppedArm, _Mapping]]] = ..., conclusions: _Optional[_Iterable[_Union[Conclusion, _Mapping]]] = ..., history: _Optional[_Iterable[_Union[ReportPoint, _Mapping]]] = ..., better_arm: _Optional[str] = ...) -> None: ...

class Metric(_message.Message):
    __slots__ = ("key", "title")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TITLE_FIELD_NUMBER: _ClassVar[int]
    key: str
    title: str
    def __init__(self, key: _Optional[str] = ..., title: _Optional[str] = ...) -> None: ...

class Conclusion(_message.Message):
    __slots__ = ("kind", "arm", "metric", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ARM_FIELD_NUMBER: _ClassVar[int]
    METRIC_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: ConclusionKind
    arm: str
    metric: str
    text: str
    def __init__(self, kind: _Optional[_Union[ConclusionKind, str]] = ..., arm: _Optional[str] = ..., metric: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class ArmRow(_message.Message):
    __slots__ = ("arm", "units", "requests", "errors", "metrics", "audited", "differing")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ARM_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    AUDITED_FIELD_NUMBER: _ClassVar[int]
    DIFFERING_FIELD_NUMBER: _ClassVar[int]
    arm: str
    units: int
    requests: int
    errors: int
    metrics: _containers.ScalarMap[str, float]
    audited: int
    differing: int
    def __init__(self, arm: _Optional[str] = ..., units: _Optional[int] = ..., requests: _Optional[int] = ..., errors: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., audited: _Optional[int] = ..., differing: _Optional[int] = ...) -> None: ...

class ArmComparison(_message.Message):
    __slots__ = ("arm", "metric", "change", "low", "high", "verdict")
    ARM_FIELD_NUMBER: _ClassVar[int]
    METRIC_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    arm: str
    metric: str
    change: float
    low: float
    high: float
    verdict: Verdict
    def __init__(self, arm: _Optional[str] = ..., metric: _Optional[str] = ..., change: _Optional[float] = ..., low: _Optional[float] = ..., high: _Optional[float] = ..., verdict: _Optional[_Union[Verdict, str]] = ...) -> None: ...

class ReportPoint(_message.Message):
    __slots__ = ("look_time", "comparisons")
    LOOK_TIME_FIELD_NUMBER: _ClassVar[int]
    COMPARISONS_FIELD_NUMBER: _ClassVar[int]
    look_time: _timestamp_pb2.Timestamp
    comparisons: _containers.RepeatedCompositeFieldContainer[ArmComparison]
    def __init__(self, look_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., comparisons: _Optional[_Iterable[_Union[ArmComparison, _Mapping]]] = ...) -> None: ...
