"""Python client for Draftwood: sync and async, typed, streaming.

    from draftwood_client import Client

    with Client("localhost:50051") as client, client.stream("Once upon a time", max_tokens=100) as stream:
        for delta in stream:
            print(delta.text, end="", flush=True)

The library imports grpcio, protobuf and googleapis-common-protos only, and none of the server's code.
"""

from draftwood_client.admin.client import AdminClient, AsyncAdminClient
from draftwood_client.aio import AsyncClient, AsyncGenerationStream
from draftwood_client.client import Client, GenerationStream
from draftwood_client.connection import TlsConfig
from draftwood_client.errors import (
    AbortedError,
    AlreadyExistsError,
    ArgumentError,
    ArgumentTypeError,
    ArgumentValueError,
    ClientClosedError,
    DeadlineError,
    DraftwoodError,
    FailedPreconditionError,
    FieldViolation,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    QuotaExceededError,
    RequestCancelledError,
    ResourceExhaustedError,
    StatusError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
)
from draftwood_client.memory import (
    MemoryClient,
    MemoryExport,
    MemoryRecord,
    MemoryStatistics,
    Purge,
    TenantMemoryStatistics,
)
from draftwood_client.request import ChatMessage, GenerateOptions, Messages, Prompt
from draftwood_client.results import (
    Completion,
    Delta,
    DraftStatistics,
    DraftTree,
    EngineAbilities,
    Finished,
    FinishReason,
    GenerationDefaults,
    ModelInfo,
    Sample,
    SampleFinished,
    SourceStatistics,
    Started,
    Timings,
    TokenDetail,
    Tokenization,
    Usage,
)
from draftwood_client.retry import NO_RETRY, RetryPolicy
from draftwood_client.tools import Tool, ToolCall, ToolCallReader, ToolFormat

__all__ = [
    "NO_RETRY",
    "AbortedError",
    "AdminClient",
    "AlreadyExistsError",
    "ArgumentError",
    "ArgumentTypeError",
    "ArgumentValueError",
    "AsyncAdminClient",
    "AsyncClient",
    "AsyncGenerationStream",
    "ChatMessage",
    "Client",
    "ClientClosedError",
    "Completion",
    "DeadlineError",
    "Delta",
    "DraftStatistics",
    "DraftTree",
    "DraftwoodError",
    "EngineAbilities",
    "FailedPreconditionError",
    "FieldViolation",
    "FinishReason",
    "Finished",
    "GenerateOptions",
    "GenerationDefaults",
    "GenerationStream",
    "InternalError",
    "InvalidRequestError",
    "MemoryClient",
    "MemoryExport",
    "MemoryRecord",
    "MemoryStatistics",
    "Messages",
    "ModelInfo",
    "NotFoundError",
    "PermissionDeniedError",
    "Prompt",
    "Purge",
    "QuotaExceededError",
    "RequestCancelledError",
    "ResourceExhaustedError",
    "RetryPolicy",
    "Sample",
    "SampleFinished",
    "SourceStatistics",
    "Started",
    "StatusError",
    "TenantMemoryStatistics",
    "Timings",
    "TlsConfig",
    "TokenDetail",
    "Tokenization",
    "Tool",
    "ToolCall",
    "ToolCallReader",
    "ToolFormat",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "Usage",
]
