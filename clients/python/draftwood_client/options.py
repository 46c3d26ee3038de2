"""Keyword arguments of calls. `Client`, `AsyncClient` and the command line all use the names of `GenerateOptions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Final, TypeAlias, TypedDict

from draftwood_client.tools import Tool


class Unset(Enum):
    """The type of `UNSET`."""

    UNSET = "UNSET"

    def __repr__(self) -> str:
        return self.value


UNSET: Final = Unset.UNSET
"""The default of arguments for which None means something else."""
Timeout: TypeAlias = float | Unset | None
"""Seconds until a call's deadline; None, or infinity, for none. The server ends a call without one after its own
`--default-timeout`."""


class CallOptions(TypedDict, total=False):
    """Keyword arguments of every call.

    `timeout`: seconds until the deadline, retries included; by default the client's, None for none.

    `metadata`: headers of this call alone, beside those of the client; names are lower-cased.
    """

    timeout: Timeout
    metadata: Mapping[str, str] | None


class GenerateOptions(TypedDict, total=False):
    """What a request may ask for. An option that is missing or None has the server's default.

    The request: `tenant`, the owner of the memory that drafts and learns ("default"); `request_id` for logs and traces;
    `session`, a key of the conversation, by which experiments give its requests the same arm;
    `priority` among the tenant's requests, -10 to 10, higher first; `model`, which must be the served one.

    Sampling: `temperature` (0, the default, is greedy), `top_k`, `top_p`, `min_p`, `repetition_penalty`,
    `presence_penalty`, `frequency_penalty`, `logit_bias` (token id to a number that is added to its logit), `seed`
    (same seed, same answer), `n` samples (sample i is the answer to seed + i).

    Tools: `tools`, what the model may call; see `ToolCallReader` for calls in its answer.

    Output format, one of: `json_schema` (JSON, or a mapping of it), `regex`, `lark`.

    Stopping: after `max_tokens`, not before `min_tokens`, before one of the `stop` strings, at one of the
    `stop_token_ids`, at the model's own end-of-sequence tokens unless `ignore_eos`.

    Drafting, which never changes the answer: `drafting=False` switches it off; `learn=False` drafts, and learns
    nothing of this request; `strategy`, one of `ModelInfo.strategies`; `max_draft_nodes` per step.

    Output: `token_details`, the text of each token and whether it was drafted; `top_logprobs`, log-probabilities of
    the tokens and of as many alternatives; `include_special_tokens`.
    """

    model: str | None
    tenant: str | None
    request_id: str | None
    session: str | None
    priority: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    logit_bias: Mapping[int, float] | None
    n: int | None
    tools: Sequence[Tool] | None
    json_schema: str | Mapping[str, Any] | None
    regex: str | None
    lark: str | None
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    drafting: bool | None
    learn: bool | None
    strategy: str | None
    max_draft_nodes: int | None
    token_details: bool | None
    include_special_tokens: bool | None
    top_logprobs: int | None
    draft_trees: bool | None


class RequestOptions(GenerateOptions, CallOptions, total=False):
    """Keyword arguments of `chat`, `complete` and their streams: those of `GenerateOptions` and `CallOptions`."""
