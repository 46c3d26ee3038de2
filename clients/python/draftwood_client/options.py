"""Arguments of clients and of calls: TLS, retries by gRPC itself (gRFC A6), and the options of requests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final, TypeAlias, TypedDict

import grpc

from draftwood_client import environment
from draftwood_client.errors import ArgumentValueError
from draftwood_client.messages import Tool


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

    Tools: `tools`, what the model may call. The answer has its calls apart from the text.

    Template: `template_kwargs`, variables of the model's chat template (JSON, or a mapping of it), such as
    `{"enable_thinking": False}`; `ModelInfo.template_kwargs` has their names.

    Output format, one of: `json_schema` (JSON, or a mapping of it), `regex`, `lark`.

    Stopping: after `max_tokens`, not before `min_tokens`, before one of the `stop` strings, at one of the
    `stop_token_ids`, at the model's own end-of-sequence tokens unless `ignore_eos`.

    Drafting, which never changes the answer: `drafting=False` switches it off; `learn=False` drafts, and learns
    nothing of this request; `strategy`, one of `ModelInfo.strategies`; `max_draft_nodes` per step.

    Output: `token_details`, the text of each token and whether it was drafted; `top_logprobs`, log-probabilities of
    the tokens and of as many alternatives; `include_special_tokens`; `raw_text`, reasoning and calls of tools as the
    model wrote them, within the text.
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
    template_kwargs: str | Mapping[str, Any] | None
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
    raw_text: bool | None


class RequestOptions(GenerateOptions, CallOptions, total=False):
    """Keyword arguments of `chat`, `complete` and their streams: those of `GenerateOptions` and `CallOptions`."""


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """TLS settings; certificates and keys are PEM bytes.

    Attributes:
        root_certificates: trusted authorities; None for gRPC's own set of public authorities.
        certificate_chain, private_key: the client certificate, for servers that require one. Both or neither.
        server_name: the name on the server's certificate, if it differs from the host of the target.

    Raises:
        ArgumentValueError: only one of `certificate_chain` and `private_key` is given.
    """

    root_certificates: bytes | None = None
    certificate_chain: bytes | None = None
    private_key: bytes | None = field(default=None, repr=False)
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate_chain is None) != (self.private_key is None):
            raise ArgumentValueError("tls", "certificate_chain and private_key must be given together")

    @classmethod
    def from_files(
        cls,
        root_certificates: str | Path | None = None,
        certificate_chain: str | Path | None = None,
        private_key: str | Path | None = None,
        server_name: str | None = None,
    ) -> TlsConfig:
        """Reads PEM files.

        Raises:
            ArgumentValueError: a file cannot be read, or only one of certificate and key is given.
        """
        return cls(
            _pem("root_certificates", root_certificates),
            _pem("certificate_chain", certificate_chain),
            _pem("private_key", private_key),
            server_name,
        )

    @classmethod
    def from_environment(cls) -> TlsConfig | None:
        """None if no variable asks for TLS. Raises `ArgumentValueError`."""
        ca, certificate = environment.read(environment.TLS_CA), environment.read(environment.CLIENT_CERT)
        key, name = environment.read(environment.CLIENT_KEY), environment.read(environment.TLS_SERVER_NAME)
        if not (environment.switch(environment.TLS) or ca or certificate or key or name):
            return None
        return cls.from_files(ca, certificate, key, name)

    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.root_certificates, self.private_key, self.certificate_chain)


def _pem(name: str, path: str | Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ArgumentValueError(f"tls.{name}", f"cannot read {str(path)!r}: {error.strerror}") from error


MAX_ATTEMPTS = 5
"""gRPC makes no more attempts, whatever a policy says."""
_MIN_SECONDS = 0.01
"""gRPC 1.85 loses a request whose delay it rounds to 0 ms (docs/decisions/grpc.md)."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how soon a request that failed with UNAVAILABLE is sent again, or one that the server's gRPC ended
    with CANCELLED, since it arrived at the moment when a server that stops closes the connection.

    If the server sent a delay (`grpc-retry-pushback-ms`), the next attempt comes after it, or never if it is negative.
    Otherwise it comes after about min(max_backoff, initial_backoff * multiplier ** (n - 1)) seconds, n being the number
    of attempts so far; gRPC draws it within 20% of that. A stream is only retried before its first event, and nothing
    past the request's deadline.

    Attributes:
        max_attempts: attempts, the first one included, at most 5; 0 and 1 both mean no retry.
        initial_backoff, max_backoff: seconds, above 0.
        multiplier: at least 1.

    Raises:
        ArgumentValueError: a value is outside its range.
    """

    max_attempts: int = 4
    initial_backoff: float = 0.1
    max_backoff: float = 5.0
    multiplier: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.max_attempts <= MAX_ATTEMPTS:
            raise _outside("max_attempts", self.max_attempts, f"it must lie in [0, {MAX_ATTEMPTS}]")
        for name in ("initial_backoff", "max_backoff"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= _MIN_SECONDS):
                raise _outside(name, value, f"it must be at least {_MIN_SECONDS:g} seconds")
        if not (math.isfinite(self.multiplier) and self.multiplier >= 1):
            raise _outside("multiplier", self.multiplier, "it must be at least 1")

    def method_config(self) -> list[dict[str, Any]]:
        """The part `methodConfig` of a gRPC service config."""
        if self.max_attempts < 2:
            return []
        policy = {
            "maxAttempts": self.max_attempts,
            "initialBackoff": f"{self.initial_backoff:.9f}s",
            "maxBackoff": f"{self.max_backoff:.9f}s",
            "backoffMultiplier": self.multiplier,
            "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
        }
        return [{"name": [{}], "retryPolicy": policy}]


NO_RETRY = RetryPolicy(max_attempts=1)


def _outside(name: str, value: float, allowed: str) -> ArgumentValueError:
    return ArgumentValueError(f"retry.{name}", f"{value!r} is not allowed; {allowed}")
