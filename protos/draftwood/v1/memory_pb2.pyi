import datetime

from draftwood.v1 import generation_pb2 as _generation_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MemoryKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMORY_KIND_UNSPECIFIED: _ClassVar[MemoryKind]
    MEMORY_KIND_OUTPUT: _ClassVar[MemoryKind]
    MEMORY_KIND_CORPUS: _ClassVar[MemoryKind]
MEMORY_KIND_UNSPECIFIED: MemoryKind
MEMORY_KIND_OUTPUT: MemoryKind
MEMORY_KIND_CORPUS: MemoryKind

class MemoryRecord(_message.Message):
    __slots__ = ("tokens", "text", "kind")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    tokens: _generation_pb2.TokenIds
    text: str
    kind: MemoryKind
    def __init__(self, tokens: _Optional[_Union[_generation_pb2.TokenIds, _Mapping]] = ..., text: _Optional[str] = ..., kind: _Optional[_Union[MemoryKind, str]] = ...) -> None: ...

class GetMemoryStatisticsRequest(_message.Message):
    __slots__ = ("tenant", "page_size", "page_token")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    page_size: int
    page_token: str
    def __init__(self, tenant: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class GetMemoryStatisticsResponse(_message.Message):
    __slots__ = ("tenants", "store", "fingerprint", "next_page_token")
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantMemoryStatistics]
    store: MemoryStoreStatistics
    fingerprint: str
    next_page_token: str
    def __init__(self, tenants: _Optional[_Iterable[_Union[TenantMemoryStatistics, _Mapping]]] = ..., store: _Optional[_Union[MemoryStoreStatistics, _Mapping]] = ..., fingerprint: _Optional[str] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class TenantMemoryStatistics(_message.Message):
    __slots__ = ("tenant", "arm", "tokens", "stored_bytes", "log_records", "purge_time", "resident", "index_bytes", "read_only")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ARM_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOG_RECORDS_FIELD_NUMBER: _ClassVar[int]
    PURGE_TIME_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    INDEX_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_ONLY_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    arm: str
    tokens: int
    stored_bytes: int
    log_records: int
    purge_time: _timestamp_pb2.Timestamp
    resident: bool
    index_bytes: int
    read_only: bool
    def __init__(self, tenant: _Optional[str] = ..., arm: _Optional[str] = ..., tokens: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., log_records: _Optional[int] = ..., purge_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., resident: bool = ..., index_bytes: _Optional[int] = ..., read_only: bool = ...) -> None: ...

class MemoryStoreStatistics(_message.Message):
    __slots__ = ("store", "healthy", "outbox_records", "learned_records", "pushed_records", "received_records", "dropped_records", "stale_records", "unreadable_values", "failures", "reconnects", "reloads", "last_lag", "resident_tenants", "resident_tokens", "index_bytes", "resident_bytes", "max_bytes", "evicted_tenants", "late_memories", "read_only_memories", "read_only_records")
    STORE_FIELD_NUMBER: _ClassVar[int]
    HEALTHY_FIELD_NUMBER: _ClassVar[int]
    OUTBOX_RECORDS_FIELD_NUMBER: _ClassVar[int]
    LEARNED_RECORDS_FIELD_NUMBER: _ClassVar[int]
    PUSHED_RECORDS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_RECORDS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_RECORDS_FIELD_NUMBER: _ClassVar[int]
    STALE_RECORDS_FIELD_NUMBER: _ClassVar[int]
    UNREADABLE_VALUES_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    RECONNECTS_FIELD_NUMBER: _ClassVar[int]
    RELOADS_FIELD_NUMBER: _ClassVar[int]
    LAST_LAG_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_TENANTS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INDEX_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_TENANTS_FIELD_NUMBER: _ClassVar[int]
    LATE_MEMORIES_FIELD_NUMBER: _ClassVar[int]
    READ_ONLY_MEMORIES_FIELD_NUMBER: _ClassVar[int]
    READ_ONLY_RECORDS_FIELD_NUMBER: _ClassVar[int]
    store: str
    healthy: bool
    outbox_records: int
    learned_records: int
    pushed_records: int
    received_records: int
    dropped_records: int
    stale_records: int
    unreadable_values: int
    failures: int
    reconnects: int
    reloads: int
    last_lag: _duration_pb2.Duration
    resident_tenants: int
    resident_tokens: int
    index_bytes: int
    resident_bytes: int
    max_bytes: int
    evicted_tenants: int
    late_memories: int
    read_only_memories: int
    read_only_records: int
    def __init__(self, store: _Optional[str] = ..., healthy: bool = ..., outbox_records: _Optional[int] = ..., learned_records: _Optional[int] = ..., pushed_records: _Optional[int] = ..., received_records: _Optional[int] = ..., dropped_records: _Optional[int] = ..., stale_records: _Optional[int] = ..., unreadable_values: _Optional[int] = ..., failures: _Optional[int] = ..., reconnects: _Optional[int] = ..., reloads: _Optional[int] = ..., last_lag: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., resident_tenants: _Optional[int] = ..., resident_tokens: _Optional[int] = ..., index_bytes: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., max_bytes: _Optional[int] = ..., evicted_tenants: _Optional[int] = ..., late_memories: _Optional[int] = ..., read_only_memories: _Optional[int] = ..., read_only_records: _Optional[int] = ...) -> None: ...

class WarmMemoryRequest(_message.Message):
    __slots__ = ("tenant", "texts")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tenant: _Optional[str] = ..., texts: _Optional[_Iterable[str]] = ...) -> None: ...

class WarmMemoryResponse(_message.Message):
    __slots__ = ("texts", "tokens")
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    texts: int
    tokens: int
    def __init__(self, texts: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class ExportMemoryRequest(_message.Message):
    __slots__ = ("tenant", "arm", "without_text")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ARM_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_TEXT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    arm: str
    without_text: bool
    def __init__(self, tenant: _Optional[str] = ..., arm: _Optional[str] = ..., without_text: bool = ...) -> None: ...

class ExportMemoryResponse(_message.Message):
    __slots__ = ("fingerprint", "model", "records")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    model: str
    records: _containers.RepeatedCompositeFieldContainer[MemoryRecord]
    def __init__(self, fingerprint: _Optional[str] = ..., model: _Optional[str] = ..., records: _Optional[_Iterable[_Union[MemoryRecord, _Mapping]]] = ...) -> None: ...

class ImportMemoryRequest(_message.Message):
    __slots__ = ("tenant", "fingerprint", "records")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    fingerprint: str
    records: _containers.RepeatedCompositeFieldContainer[MemoryRecord]
    def __init__(self, tenant: _Optional[str] = ..., fingerprint: _Optional[str] = ..., records: _Optional[_Iterable[_Union[MemoryRecord, _Mapping]]] = ...) -> None: ...

class ImportMemoryResponse(_message.Message):
    __slots__ = ("records", "tokens")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    records: int
    tokens: int
    def __init__(self, records: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class PurgeMemoryRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class PurgeMemoryResponse(_message.Message):
    __slots__ = ("memories", "tokens", "final_time")
    MEMORIES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINAL_TIME_FIELD_NUMBER: _ClassVar[int]
    memories: int
    tokens: int
    final_time: _timestamp_pb2.Timestamp
    def __init__(self, memories: _Optional[int] = ..., tokens: _Optional[int] = ..., final_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class ListOrphanedMemoriesRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListOrphanedMemoriesResponse(_message.Message):
    __slots__ = ("memories", "next_page_token")
    MEMORIES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    memories: _containers.RepeatedCompositeFieldContainer[OrphanedMemory]
    next_page_token: str
    def __init__(self, memories: _Optional[_Iterable[_Union[OrphanedMemory, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class OrphanedMemory(_message.Message):
    __slots__ = ("tag", "fingerprint", "tenant", "arm", "tokens", "stored_bytes", "unserved_duration")
    TAG_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ARM_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNSERVED_DURATION_FIELD_NUMBER: _ClassVar[int]
    tag: str
    fingerprint: str
    tenant: str
    arm: str
    tokens: int
    stored_bytes: int
    unserved_duration: _duration_pb2.Duration
    def __init__(self, tag: _Optional[str] = ..., fingerprint: _Optional[str] = ..., tenant: _Optional[str] = ..., arm: _Optional[str] = ..., tokens: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., unserved_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class PurgeOrphanedMemoriesRequest(_message.Message):
    __slots__ = ("fingerprint",)
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    def __init__(self, fingerprint: _Optional[str] = ...) -> None: ...

class PurgeOrphanedMemoriesResponse(_message.Message):
    __slots__ = ("memories", "tokens")
    MEMORIES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    memories: int
    tokens: int
    def __init__(self, memories: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...
