import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_TOOL_CALLS: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_TOOL_CALLS: FinishReason
FINISH_REASON_CANCELLED: FinishReason

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "reasoning", "tool_calls", "tool_call_id", "tool_name")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    TOOL_NAME_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: _containers.RepeatedCompositeFieldContainer[ContentPart]
    reasoning: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    tool_name: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[_Iterable[_Union[ContentPart, _Mapping]]] = ..., reasoning: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., tool_name: _Optional[str] = ...) -> None: ...

class ContentPart(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages", "tools", "template_kwargs")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    template_kwargs: str
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., template_kwargs: _Optional[str] = ...) -> None: ...

class Tool(_message.Message):
    __slots__ = ("name", "description", "parameters")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters: str
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class ToolFormat(_message.Message):
    __slots__ = ("begin", "end", "between", "name_key", "arguments_key")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    BETWEEN_FIELD_NUMBER: _ClassVar[int]
    NAME_KEY_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_KEY_FIELD_NUMBER: _ClassVar[int]
    begin: str
    end: str
    between: str
    name_key: str
    arguments_key: str
    def __init__(self, begin: _Optional[str] = ..., end: _Optional[str] = ..., between: _Optional[str] = ..., name_key: _Optional[str] = ..., arguments_key: _Optional[str] = ...) -> None: ...

class ReasoningFormat(_message.Message):
    __slots__ = ("begin", "end", "opened_by_prompt")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    OPENED_BY_PROMPT_FIELD_NUMBER: _ClassVar[int]
    begin: str
    end: str
    opened_by_prompt: bool
    def __init__(self, begin: _Optional[str] = ..., end: _Optional[str] = ..., opened_by_prompt: bool = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("text", "token_ids", "chat", "tenant", "request_id", "sampling", "stop", "drafting", "output", "format", "priority", "model", "session")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: TokenIds
    chat: Chat
    tenant: str
    request_id: str
    sampling: SamplingOptions
    stop: StopOptions
    drafting: DraftOptions
    output: OutputOptions
    format: OutputFormat
    priority: int
    model: str
    session: str
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., tenant: _Optional[str] = ..., request_id: _Optional[str] = ..., sampling: _Optional[_Union[SamplingOptions, _Mapping]] = ..., stop: _Optional[_Union[StopOptions, _Mapping]] = ..., drafting: _Optional[_Union[DraftOptions, _Mapping]] = ..., output: _Optional[_Union[OutputOptions, _Mapping]] = ..., format: _Optional[_Union[OutputFormat, _Mapping]] = ..., priority: _Optional[int] = ..., model: _Optional[str] = ..., session: _Optional[str] = ...) -> None: ...

class SamplingOptions(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "logit_bias", "n")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logit_bias: _containers.ScalarMap[int, float]
    n: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., n: _Optional[int] = ...) -> None: ...

class StopOptions(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "strings", "token_ids", "ignore_eos")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STRINGS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    strings: _containers.RepeatedScalarFieldContainer[str]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., strings: _Optional[_Iterable[str]] = ..., token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ...) -> None: ...

class DraftOptions(_message.Message):
    __slots__ = ("enabled", "strategy", "max_nodes", "learn")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    LEARN_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    strategy: str
    max_nodes: int
    learn: bool
    def __init__(self, enabled: bool = ..., strategy: _Optional[str] = ..., max_nodes: _Optional[int] = ..., learn: bool = ...) -> None: ...

class OutputFormat(_message.Message):
    __slots__ = ("json_schema", "regex", "lark")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    lark: str
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., lark: _Optional[str] = ...) -> None: ...

class OutputOptions(_message.Message):
    __slots__ = ("token_details", "include_special_tokens", "top_logprobs", "draft_trees", "raw_text")
    TOKEN_DETAILS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TREES_FIELD_NUMBER: _ClassVar[int]
    RAW_TEXT_FIELD_NUMBER: _ClassVar[int]
    token_details: bool
    include_special_tokens: bool
    top_logprobs: int
    draft_trees: bool
    raw_text: bool
    def __init__(self, token_details: bool = ..., include_special_tokens: bool = ..., top_logprobs: _Optional[int] = ..., draft_trees: bool = ..., raw_text: bool = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "answers", "usage", "timings", "drafting", "padding")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    started: Started
    answers: _containers.RepeatedCompositeFieldContainer[Answer]
    usage: Usage
    timings: Timings
    drafting: DraftStatistics
    padding: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., answers: _Optional[_Iterable[_Union[Answer, _Mapping]]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., drafting: _Optional[_Union[DraftStatistics, _Mapping]] = ..., padding: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("parts", "token_ids", "details", "draft_trees", "result")
    PARTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TREES_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[AnswerPart]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    details: _containers.RepeatedCompositeFieldContainer[TokenDetail]
    draft_trees: _containers.RepeatedCompositeFieldContainer[DraftTree]
    result: SampleResult
    def __init__(self, parts: _Optional[_Iterable[_Union[AnswerPart, _Mapping]]] = ..., token_ids: _Optional[_Iterable[int]] = ..., details: _Optional[_Iterable[_Union[TokenDetail, _Mapping]]] = ..., draft_trees: _Optional[_Iterable[_Union[DraftTree, _Mapping]]] = ..., result: _Optional[_Union[SampleResult, _Mapping]] = ...) -> None: ...

class AnswerPart(_message.Message):
    __slots__ = ("text", "reasoning", "tool_call")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_FIELD_NUMBER: _ClassVar[int]
    text: str
    reasoning: str
    tool_call: ToolCall
    def __init__(self, text: _Optional[str] = ..., reasoning: _Optional[str] = ..., tool_call: _Optional[_Union[ToolCall, _Mapping]] = ...) -> None: ...

class GenerateStreamResponse(_message.Message):
    __slots__ = ("started", "delta", "finished", "padding")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    started: Started
    delta: Delta
    finished: Finished
    padding: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., padding: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("request_id", "model", "tenant", "strategy", "prompt_tokens", "max_tokens", "experiment", "arm")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPERIMENT_FIELD_NUMBER: _ClassVar[int]
    ARM_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    tenant: str
    strategy: str
    prompt_tokens: int
    max_tokens: int
    experiment: str
    arm: str
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ..., strategy: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., experiment: _Optional[str] = ..., arm: _Optional[str] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("sample", "parts", "token_ids", "details", "draft_trees", "result")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TREES_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    sample: int
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    details: _containers.RepeatedCompositeFieldContainer[TokenDetail]
    draft_trees: _containers.RepeatedCompositeFieldContainer[DraftTree]
    result: SampleResult
    def __init__(self, sample: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ..., token_ids: _Optional[_Iterable[int]] = ..., details: _Optional[_Iterable[_Union[TokenDetail, _Mapping]]] = ..., draft_trees: _Optional[_Iterable[_Union[DraftTree, _Mapping]]] = ..., result: _Optional[_Union[SampleResult, _Mapping]] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("text", "reasoning", "tool_call")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_FIELD_NUMBER: _ClassVar[int]
    text: str
    reasoning: str
    tool_call: ToolCallDelta
    def __init__(self, text: _Optional[str] = ..., reasoning: _Optional[str] = ..., tool_call: _Optional[_Union[ToolCallDelta, _Mapping]] = ...) -> None: ...

class ToolCallDelta(_message.Message):
    __slots__ = ("index", "id", "name", "arguments")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: str
    name: str
    arguments: str
    def __init__(self, index: _Optional[int] = ..., id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class DraftTree(_message.Message):
    __slots__ = ("token_ids", "tokens", "parents", "accepted")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[str]
    parents: _containers.RepeatedScalarFieldContainer[int]
    accepted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[str]] = ..., parents: _Optional[_Iterable[int]] = ..., accepted: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenDetail(_message.Message):
    __slots__ = ("token_id", "text", "bytes", "special", "drafted", "logprob", "top_logprobs")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    text: str
    bytes: bytes
    special: bool
    drafted: bool
    logprob: float
    top_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, token_id: _Optional[int] = ..., text: _Optional[str] = ..., bytes: _Optional[bytes] = ..., special: bool = ..., drafted: bool = ..., logprob: _Optional[float] = ..., top_logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "text", "bytes", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    text: str
    bytes: bytes
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., text: _Optional[str] = ..., bytes: _Optional[bytes] = ..., logprob: _Optional[float] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("samples", "usage", "timings", "drafting")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[SampleResult]
    usage: Usage
    timings: Timings
    drafting: DraftStatistics
    def __init__(self, samples: _Optional[_Iterable[_Union[SampleResult, _Mapping]]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., drafting: _Optional[_Union[DraftStatistics, _Mapping]] = ...) -> None: ...

class SampleResult(_message.Message):
    __slots__ = ("reason", "stop_string", "stop_token_id", "usage", "seed")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    stop_string: str
    stop_token_id: int
    usage: SampleUsage
    seed: int
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., usage: _Optional[_Union[SampleUsage, _Mapping]] = ..., seed: _Optional[int] = ...) -> None: ...

class SampleUsage(_message.Message):
    __slots__ = ("completion_tokens", "reasoning_tokens", "accepted_draft_tokens")
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    completion_tokens: int
    reasoning_tokens: int
    accepted_draft_tokens: int
    def __init__(self, completion_tokens: _Optional[int] = ..., reasoning_tokens: _Optional[int] = ..., accepted_draft_tokens: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_prompt_tokens", "completion_tokens", "reasoning_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., reasoning_tokens: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue", "prefill", "decode")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    queue: _duration_pb2.Duration
    prefill: _duration_pb2.Duration
    decode: _duration_pb2.Duration
    def __init__(self, queue: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prefill: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., decode: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DraftStatistics(_message.Message):
    __slots__ = ("mean_acceptance_length", "steps", "draft_tokens", "accepted_tokens", "accepted_by_depth", "by_source", "draft_duration", "step_duration", "model_duration", "disabled_reason")
    class BySourceEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: SourceStatistics
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[SourceStatistics, _Mapping]] = ...) -> None: ...
    MEAN_ACCEPTANCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BY_DEPTH_FIELD_NUMBER: _ClassVar[int]
    BY_SOURCE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_DURATION_FIELD_NUMBER: _ClassVar[int]
    STEP_DURATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_DURATION_FIELD_NUMBER: _ClassVar[int]
    DISABLED_REASON_FIELD_NUMBER: _ClassVar[int]
    mean_acceptance_length: float
    steps: int
    draft_tokens: int
    accepted_tokens: int
    accepted_by_depth: _containers.RepeatedScalarFieldContainer[int]
    by_source: _containers.MessageMap[str, SourceStatistics]
    draft_duration: _duration_pb2.Duration
    step_duration: _duration_pb2.Duration
    model_duration: _duration_pb2.Duration
    disabled_reason: str
    def __init__(self, mean_acceptance_length: _Optional[float] = ..., steps: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., accepted_by_depth: _Optional[_Iterable[int]] = ..., by_source: _Optional[_Mapping[str, SourceStatistics]] = ..., draft_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., step_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., model_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., disabled_reason: _Optional[str] = ...) -> None: ...

class SourceStatistics(_message.Message):
    __slots__ = ("draft_tokens", "accepted_tokens")
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    draft_tokens: int
    accepted_tokens: int
    def __init__(self, draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text", "chat", "model")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    text: str
    chat: Chat
    model: str
    def __init__(self, text: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., model: _Optional[str] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "tokens")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[str]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("token_ids", "include_special_tokens", "model")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    include_special_tokens: bool
    model: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., include_special_tokens: bool = ..., model: _Optional[str] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("model", "architecture", "parameters", "dtype", "device", "vocab_size", "max_context_tokens", "max_running_requests", "max_waiting_requests", "max_draft_nodes", "has_chat_template", "strategies", "default_strategy", "eos_token_ids", "server_version", "exact", "runner", "runner_reason", "weights", "generation_defaults", "limits", "memory_max_bytes", "tool_format", "no_tools_reason", "abilities", "draft_models", "reasoning_format", "template_kwargs")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_NODES_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    STRATEGIES_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_STRATEGY_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    RUNNER_REASON_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOOL_FORMAT_FIELD_NUMBER: _ClassVar[int]
    NO_TOOLS_REASON_FIELD_NUMBER: _ClassVar[int]
    ABILITIES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MODELS_FIELD_NUMBER: _ClassVar[int]
    REASONING_FORMAT_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    model: str
    architecture: str
    parameters: int
    dtype: str
    device: str
    vocab_size: int
    max_context_tokens: int
    max_running_requests: int
    max_waiting_requests: int
    max_draft_nodes: int
    has_chat_template: bool
    strategies: _containers.RepeatedScalarFieldContainer[str]
    default_strategy: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    server_version: str
    exact: bool
    runner: str
    runner_reason: str
    weights: str
    generation_defaults: GenerationDefaults
    limits: RequestLimits
    memory_max_bytes: int
    tool_format: ToolFormat
    no_tools_reason: str
    abilities: EngineAbilities
    draft_models: _containers.RepeatedCompositeFieldContainer[DraftModel]
    reasoning_format: ReasoningFormat
    template_kwargs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[str] = ..., architecture: _Optional[str] = ..., parameters: _Optional[int] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., max_running_requests: _Optional[int] = ..., max_waiting_requests: _Optional[int] = ..., max_draft_nodes: _Optional[int] = ..., has_chat_template: bool = ..., strategies: _Optional[_Iterable[str]] = ..., default_strategy: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., server_version: _Optional[str] = ..., exact: bool = ..., runner: _Optional[str] = ..., runner_reason: _Optional[str] = ..., weights: _Optional[str] = ..., generation_defaults: _Optional[_Union[GenerationDefaults, _Mapping]] = ..., limits: _Optional[_Union[RequestLimits, _Mapping]] = ..., memory_max_bytes: _Optional[int] = ..., tool_format: _Optional[_Union[ToolFormat, _Mapping]] = ..., no_tools_reason: _Optional[str] = ..., abilities: _Optional[_Union[EngineAbilities, _Mapping]] = ..., draft_models: _Optional[_Iterable[_Union[DraftModel, _Mapping]]] = ..., reasoning_format: _Optional[_Union[ReasoningFormat, _Mapping]] = ..., template_kwargs: _Optional[_Iterable[str]] = ...) -> None: ...

class DraftModel(_message.Message):
    __slots__ = ("strategy", "name", "parameters")
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    strategy: str
    name: str
    parameters: int
    def __init__(self, strategy: _Optional[str] = ..., name: _Optional[str] = ..., parameters: _Optional[int] = ...) -> None: ...

class EngineAbilities(_message.Message):
    __slots__ = ("engine", "version", "reproducible_seeds", "draft_trees", "branching_drafts", "min_p", "logit_bias", "max_temperature", "max_penalty", "max_logprobs", "formats", "pauses", "preempts", "audits_samples")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REPRODUCIBLE_SEEDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TREES_FIELD_NUMBER: _ClassVar[int]
    BRANCHING_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MAX_TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    MAX_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FORMATS_FIELD_NUMBER: _ClassVar[int]
    PAUSES_FIELD_NUMBER: _ClassVar[int]
    PREEMPTS_FIELD_NUMBER: _ClassVar[int]
    AUDITS_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    engine: str
    version: str
    reproducible_seeds: bool
    draft_trees: bool
    branching_drafts: bool
    min_p: bool
    logit_bias: bool
    max_temperature: float
    max_penalty: float
    max_logprobs: int
    formats: _containers.RepeatedScalarFieldContainer[str]
    pauses: bool
    preempts: bool
    audits_samples: bool
    def __init__(self, engine: _Optional[str] = ..., version: _Optional[str] = ..., reproducible_seeds: bool = ..., draft_trees: bool = ..., branching_drafts: bool = ..., min_p: bool = ..., logit_bias: bool = ..., max_temperature: _Optional[float] = ..., max_penalty: _Optional[float] = ..., max_logprobs: _Optional[int] = ..., formats: _Optional[_Iterable[str]] = ..., pauses: bool = ..., preempts: bool = ..., audits_samples: bool = ...) -> None: ...

class RequestLimits(_message.Message):
    __slots__ = ("message_bytes", "prompt_characters", "chat_messages", "stop_strings", "stop_string_characters", "stop_token_ids", "logit_biases", "format_characters", "samples", "tools", "template_kwargs_characters")
    MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_CHARACTERS_FIELD_NUMBER: _ClassVar[int]
    CHAT_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_CHARACTERS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIASES_FIELD_NUMBER: _ClassVar[int]
    FORMAT_CHARACTERS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_KWARGS_CHARACTERS_FIELD_NUMBER: _ClassVar[int]
    message_bytes: int
    prompt_characters: int
    chat_messages: int
    stop_strings: int
    stop_string_characters: int
    stop_token_ids: int
    logit_biases: int
    format_characters: int
    samples: int
    tools: int
    template_kwargs_characters: int
    def __init__(self, message_bytes: _Optional[int] = ..., prompt_characters: _Optional[int] = ..., chat_messages: _Optional[int] = ..., stop_strings: _Optional[int] = ..., stop_string_characters: _Optional[int] = ..., stop_token_ids: _Optional[int] = ..., logit_biases: _Optional[int] = ..., format_characters: _Optional[int] = ..., samples: _Optional[int] = ..., tools: _Optional[int] = ..., template_kwargs_characters: _Optional[int] = ...) -> None: ...

class GenerationDefaults(_message.Message):
    __slots__ = ("sampling", "stop", "constraints")
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINTS_FIELD_NUMBER: _ClassVar[int]
    sampling: SamplingOptions
    stop: StopOptions
    constraints: LogitConstraints
    def __init__(self, sampling: _Optional[_Union[SamplingOptions, _Mapping]] = ..., stop: _Optional[_Union[StopOptions, _Mapping]] = ..., constraints: _Optional[_Union[LogitConstraints, _Mapping]] = ...) -> None: ...

class LogitConstraints(_message.Message):
    __slots__ = ("no_repeat_ngram_size", "bad_words", "suppressed", "suppressed_first", "forced_last")
    NO_REPEAT_NGRAM_SIZE_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    SUPPRESSED_FIELD_NUMBER: _ClassVar[int]
    SUPPRESSED_FIRST_FIELD_NUMBER: _ClassVar[int]
    FORCED_LAST_FIELD_NUMBER: _ClassVar[int]
    no_repeat_ngram_size: int
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenIds]
    suppressed: _containers.RepeatedScalarFieldContainer[int]
    suppressed_first: _containers.RepeatedScalarFieldContainer[int]
    forced_last: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, no_repeat_ngram_size: _Optional[int] = ..., bad_words: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., suppressed: _Optional[_Iterable[int]] = ..., suppressed_first: _Optional[_Iterable[int]] = ..., forced_last: _Optional[_Iterable[int]] = ...) -> None: ...
