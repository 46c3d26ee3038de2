import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServingState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVING_STATE_UNSPECIFIED: _ClassVar[ServingState]
    SERVING_STATE_SERVING: _ClassVar[ServingState]
    SERVING_STATE_RESTARTING: _ClassVar[ServingState]
    SERVING_STATE_DRAINING: _ClassVar[ServingState]
    SERVING_STATE_CONFIGURATION_UNKNOWN: _ClassVar[ServingState]
SERVING_STATE_UNSPECIFIED: ServingState
SERVING_STATE_SERVING: ServingState
SERVING_STATE_RESTARTING: ServingState
SERVING_STATE_DRAINING: ServingState
SERVING_STATE_CONFIGURATION_UNKNOWN: ServingState

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: ServerStatus
    def __init__(self, status: _Optional[_Union[ServerStatus, _Mapping]] = ...) -> None: ...

class WatchStatusRequest(_message.Message):
    __slots__ = ("interval",)
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    interval: _duration_pb2.Duration
    def __init__(self, interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WatchStatusResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: ServerStatus
    def __init__(self, status: _Optional[_Union[ServerStatus, _Mapping]] = ...) -> None: ...

class ServerStatus(_message.Message):
    __slots__ = ("report_time", "uptime", "server_version", "model", "dtype", "runner", "state", "tenants", "load")
    REPORT_TIME_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    report_time: _timestamp_pb2.Timestamp
    uptime: _duration_pb2.Duration
    server_version: str
    model: str
    dtype: str
    runner: str
    state: ServingState
    tenants: _containers.RepeatedCompositeFieldContainer[TenantStatus]
    load: LoadStatus
    def __init__(self, report_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., uptime: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., server_version: _Optional[str] = ..., model: _Optional[str] = ..., dtype: _Optional[str] = ..., runner: _Optional[str] = ..., state: _Optional[_Union[ServingState, str]] = ..., tenants: _Optional[_Iterable[_Union[TenantStatus, _Mapping]]] = ..., load: _Optional[_Union[LoadStatus, _Mapping]] = ...) -> None: ...

class TenantStatus(_message.Message):
    __slots__ = ("tenant", "running", "waiting", "tokens", "decode_steps", "draft_tokens", "accepted_tokens")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    running: int
    waiting: int
    tokens: int
    decode_steps: int
    draft_tokens: int
    accepted_tokens: int
    def __init__(self, tenant: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., tokens: _Optional[int] = ..., decode_steps: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...

class LoadStatus(_message.Message):
    __slots__ = ("running", "waiting", "max_running", "max_waiting", "kv_pages_used", "kv_pages_cached", "kv_pages", "steps", "busy", "prompt_tokens", "cached_prompt_tokens", "tokens", "decode_steps", "preemptions", "engine_restarts", "draft_tokens", "drafting", "sources", "accepted_by_depth", "store", "audits", "own_text_failed")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_PAGES_USED_FIELD_NUMBER: _ClassVar[int]
    KV_PAGES_CACHED_FIELD_NUMBER: _ClassVar[int]
    KV_PAGES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BY_DEPTH_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    AUDITS_FIELD_NUMBER: _ClassVar[int]
    OWN_TEXT_FAILED_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    max_running: int
    max_waiting: int
    kv_pages_used: int
    kv_pages_cached: int
    kv_pages: int
    steps: int
    busy: _duration_pb2.Duration
    prompt_tokens: int
    cached_prompt_tokens: int
    tokens: int
    decode_steps: int
    preemptions: int
    engine_restarts: int
    draft_tokens: int
    drafting: _containers.RepeatedCompositeFieldContainer[DraftingStatus]
    sources: _containers.RepeatedCompositeFieldContainer[SourceStatus]
    accepted_by_depth: _containers.RepeatedScalarFieldContainer[int]
    store: StoreStatus
    audits: AuditStatus
    own_text_failed: bool
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., max_running: _Optional[int] = ..., max_waiting: _Optional[int] = ..., kv_pages_used: _Optional[int] = ..., kv_pages_cached: _Optional[int] = ..., kv_pages: _Optional[int] = ..., steps: _Optional[int] = ..., busy: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ..., tokens: _Optional[int] = ..., decode_steps: _Optional[int] = ..., preemptions: _Optional[int] = ..., engine_restarts: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., drafting: _Optional[_Iterable[_Union[DraftingStatus, _Mapping]]] = ..., sources: _Optional[_Iterable[_Union[SourceStatus, _Mapping]]] = ..., accepted_by_depth: _Optional[_Iterable[int]] = ..., store: _Optional[_Union[StoreStatus, _Mapping]] = ..., audits: _Optional[_Union[AuditStatus, _Mapping]] = ..., own_text_failed: bool = ...) -> None: ...

class DraftingStatus(_message.Message):
    __slots__ = ("strategy", "arm", "requests", "tokens", "decode_steps", "draft_tokens", "accepted_tokens", "draft_duration", "disabled")
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    ARM_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_DURATION_FIELD_NUMBER: _ClassVar[int]
    DISABLED_FIELD_NUMBER: _ClassVar[int]
    strategy: str
    arm: str
    requests: int
    tokens: int
    decode_steps: int
    draft_tokens: int
    accepted_tokens: int
    draft_duration: _duration_pb2.Duration
    disabled: int
    def __init__(self, strategy: _Optional[str] = ..., arm: _Optional[str] = ..., requests: _Optional[int] = ..., tokens: _Optional[int] = ..., decode_steps: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., draft_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., disabled: _Optional[int] = ...) -> None: ...

class SourceStatus(_message.Message):
    __slots__ = ("source", "draft_tokens", "accepted_tokens")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    source: str
    draft_tokens: int
    accepted_tokens: int
    def __init__(self, source: _Optional[str] = ..., draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...

class StoreStatus(_message.Message):
    __slots__ = ("up", "lag", "pending_records", "dropped_records", "late_memories", "memories", "memory_tokens", "memory_bytes")
    UP_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    PENDING_RECORDS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_RECORDS_FIELD_NUMBER: _ClassVar[int]
    LATE_MEMORIES_FIELD_NUMBER: _ClassVar[int]
    MEMORIES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    up: bool
    lag: _duration_pb2.Duration
    pending_records: int
    dropped_records: int
    late_memories: int
    memories: int
    memory_tokens: int
    memory_bytes: int
    def __init__(self, up: bool = ..., lag: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., pending_records: _Optional[int] = ..., dropped_records: _Optional[int] = ..., late_memories: _Optional[int] = ..., memories: _Optional[int] = ..., memory_tokens: _Optional[int] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class AuditStatus(_message.Message):
    __slots__ = ("audited", "differing", "ties", "failed")
    AUDITED_FIELD_NUMBER: _ClassVar[int]
    DIFFERING_FIELD_NUMBER: _ClassVar[int]
    TIES_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    audited: int
    differing: int
    ties: int
    failed: int
    def __init__(self, audited: _Optional[int] = ..., differing: _Optional[int] = ..., ties: _Optional[int] = ..., failed: _Optional[int] = ...) -> None: ...
