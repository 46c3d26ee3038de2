import datetime

from draftwood.v1 import generation_pb2 as _generation_pb2
from google.api import field_behavior_pb2 as _field_behavior_pb2
from google.api import resource_pb2 as _resource_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import empty_pb2 as _empty_pb2
from google.protobuf import field_mask_pb2 as _field_mask_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ResourceOrigin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESOURCE_ORIGIN_UNSPECIFIED: _ClassVar[ResourceOrigin]
    RESOURCE_ORIGIN_API: _ClassVar[ResourceOrigin]
    RESOURCE_ORIGIN_FILE: _ClassVar[ResourceOrigin]

class LearningScope(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEARNING_SCOPE_UNSPECIFIED: _ClassVar[LearningScope]
    LEARNING_SCOPE_NOTHING: _ClassVar[LearningScope]
    LEARNING_SCOPE_OUTPUTS: _ClassVar[LearningScope]
    LEARNING_SCOPE_PROMPTS_AND_OUTPUTS: _ClassVar[LearningScope]
RESOURCE_ORIGIN_UNSPECIFIED: ResourceOrigin
RESOURCE_ORIGIN_API: ResourceOrigin
RESOURCE_ORIGIN_FILE: ResourceOrigin
LEARNING_SCOPE_UNSPECIFIED: LearningScope
LEARNING_SCOPE_NOTHING: LearningScope
LEARNING_SCOPE_OUTPUTS: LearningScope
LEARNING_SCOPE_PROMPTS_AND_OUTPUTS: LearningScope

class Tenant(_message.Message):
    __slots__ = ("name", "description", "etag", "create_time", "update_time", "origin", "drafting", "allow_draft_override", "learning", "quotas", "weight", "sampling", "streaming")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    UPDATE_TIME_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_FIELD_NUMBER: _ClassVar[int]
    ALLOW_DRAFT_OVERRIDE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_FIELD_NUMBER: _ClassVar[int]
    QUOTAS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STREAMING_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    etag: str
    create_time: _timestamp_pb2.Timestamp
    update_time: _timestamp_pb2.Timestamp
    origin: ResourceOrigin
    drafting: DraftConfig
    allow_draft_override: bool
    learning: LearningConfig
    quotas: QuotaConfig
    weight: float
    sampling: _generation_pb2.SamplingOptions
    streaming: StreamConfig
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., etag: _Optional[str] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., update_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., origin: _Optional[_Union[ResourceOrigin, str]] = ..., drafting: _Optional[_Union[DraftConfig, _Mapping]] = ..., allow_draft_override: bool = ..., learning: _Optional[_Union[LearningConfig, _Mapping]] = ..., quotas: _Optional[_Union[QuotaConfig, _Mapping]] = ..., weight: _Optional[float] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingOptions, _Mapping]] = ..., streaming: _Optional[_Union[StreamConfig, _Mapping]] = ...) -> None: ...

class DraftConfig(_message.Message):
    __slots__ = ("strategy", "options", "max_nodes")
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    strategy: str
    options: _struct_pb2.Struct
    max_nodes: int
    def __init__(self, strategy: _Optional[str] = ..., options: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., max_nodes: _Optional[int] = ...) -> None: ...

class LearningConfig(_message.Message):
    __slots__ = ("scope", "idle_ttl", "max_tokens", "max_bytes", "max_age")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    IDLE_TTL_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_AGE_FIELD_NUMBER: _ClassVar[int]
    scope: LearningScope
    idle_ttl: _duration_pb2.Duration
    max_tokens: int
    max_bytes: int
    max_age: _duration_pb2.Duration
    def __init__(self, scope: _Optional[_Union[LearningScope, str]] = ..., idle_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_tokens: _Optional[int] = ..., max_bytes: _Optional[int] = ..., max_age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class QuotaConfig(_message.Message):
    __slots__ = ("requests_per_minute", "tokens_per_minute", "concurrency")
    REQUESTS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    requests_per_minute: int
    tokens_per_minute: int
    concurrency: int
    def __init__(self, requests_per_minute: _Optional[int] = ..., tokens_per_minute: _Optional[int] = ..., concurrency: _Optional[int] = ...) -> None: ...

class StreamConfig(_message.Message):
    __slots__ = ("cadence", "padding_bytes", "rounding")
    CADENCE_FIELD_NUMBER: _ClassVar[int]
    PADDING_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROUNDING_FIELD_NUMBER: _ClassVar[int]
    cadence: _duration_pb2.Duration
    padding_bytes: int
    rounding: int
    def __init__(self, cadence: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., padding_bytes: _Optional[int] = ..., rounding: _Optional[int] = ...) -> None: ...

class GetTenantRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListTenantsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListTenantsResponse(_message.Message):
    __slots__ = ("tenants", "next_page_token")
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[Tenant]
    next_page_token: str
    def __init__(self, tenants: _Optional[_Iterable[_Union[Tenant, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class CreateTenantRequest(_message.Message):
    __slots__ = ("tenant_id", "tenant", "validate_only")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    tenant: Tenant
    validate_only: bool
    def __init__(self, tenant_id: _Optional[str] = ..., tenant: _Optional[_Union[Tenant, _Mapping]] = ..., validate_only: bool = ...) -> None: ...

class UpdateTenantRequest(_message.Message):
    __slots__ = ("tenant", "update_mask", "validate_only", "allow_missing")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    UPDATE_MASK_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    ALLOW_MISSING_FIELD_NUMBER: _ClassVar[int]
    tenant: Tenant
    update_mask: _field_mask_pb2.FieldMask
    validate_only: bool
    allow_missing: bool
    def __init__(self, tenant: _Optional[_Union[Tenant, _Mapping]] = ..., update_mask: _Optional[_Union[_field_mask_pb2.FieldMask, _Mapping]] = ..., validate_only: bool = ..., allow_missing: bool = ...) -> None: ...

class DeleteTenantRequest(_message.Message):
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
