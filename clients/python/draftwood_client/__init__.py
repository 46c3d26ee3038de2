"""Python client for Draftwood: sync and async, typed, streaming.

    from draftwood_client import Client

    with Client("localhost:50051") as client, client.stream_chat("Where is my order?", max_tokens=100) as stream:
        for delta in stream:
            print(delta.text, end="", flush=True)

Answers are the protocol's own messages, but for a `Delta`, which shows its parts, and a `Completion`, which is joined
from all of them.

The library imports grpcio, protobuf and googleapis-common-protos only, and none of the server's code.
"""

from draftwood.admin.v1.experiments_pb2 import Experiment, ExperimentArm, ExperimentGuardrails, ExperimentReport
from draftwood.admin.v1.status_pb2 import ServerStatus
from draftwood.admin.v1.tenants_pb2 import DraftConfig, LearningConfig, QuotaConfig, StreamConfig, Tenant
from draftwood.v1.generation_pb2 import (
    DraftTree,
    Finished,
    SampleResult,
    SampleUsage,
    Started,
    TokenDetail,
    TokenLogprob,
    ToolCallDelta,
    ToolFormat,
    Usage,
)
from draftwood.v1.generation_pb2 import GetModelInfoResponse as ModelInfo
from draftwood.v1.generation_pb2 import TokenizeResponse as Tokenization
from draftwood_client.admin import AdminClient, AsyncAdminClient
from draftwood_client.client import AsyncClient, Client
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
from draftwood_client.memory import MemoryClient, MemoryExport, MemoryRecord
from draftwood_client.messages import ChatMessage, Messages, Prompt, Tool, ToolCall
from draftwood_client.options import NO_RETRY, CallOptions, GenerateOptions, RequestOptions, RetryPolicy, TlsConfig
from draftwood_client.results import Completion, Delta, DraftStatistics, FinishReason, Sample, Timings
from draftwood_client.streams import AsyncGenerationStream, GenerationStream

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
    "CallOptions",
    "ChatMessage",
    "Client",
    "ClientClosedError",
    "Completion",
    "DeadlineError",
    "Delta",
    "DraftConfig",
    "DraftStatistics",
    "DraftTree",
    "DraftwoodError",
    "Experiment",
    "ExperimentArm",
    "ExperimentGuardrails",
    "ExperimentReport",
    "FailedPreconditionError",
    "FieldViolation",
    "FinishReason",
    "Finished",
    "GenerateOptions",
    "GenerationStream",
    "InternalError",
    "InvalidRequestError",
    "LearningConfig",
    "MemoryClient",
    "MemoryExport",
    "MemoryRecord",
    "Messages",
    "ModelInfo",
    "NotFoundError",
    "PermissionDeniedError",
    "Prompt",
    "QuotaConfig",
    "QuotaExceededError",
    "RequestCancelledError",
    "RequestOptions",
    "ResourceExhaustedError",
    "RetryPolicy",
    "Sample",
    "SampleResult",
    "SampleUsage",
    "ServerStatus",
    "Started",
    "StatusError",
    "StreamConfig",
    "Tenant",
    "Timings",
    "TlsConfig",
    "TokenDetail",
    "TokenLogprob",
    "Tokenization",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolFormat",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "Usage",
]
