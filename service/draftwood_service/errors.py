"""The service's own errors; `rpc/statuses.py` has the status of each.

DraftwoodError
├── ContextLengthError      prompt and answer do not fit the model's context; an InvalidInputError
├── UnsupportedByEngineError  the engine of this server cannot do it; an InvalidInputError
├── QueueFullError          the limit of live requests is reached
├── QuotaExceededError      a tenant's rate limit is reached (draftwood_service.quotas)
├── TooMuchTextError        too many long texts wait to be read
├── TooManyWatchesError     the limit of open WatchStatus calls is reached
├── MemoriesKeptError       an experiment is deleted, and the memories of its arms are not
├── ModelNotServedError     the request names another model
├── LoadingError            the model is not loaded yet
├── ShuttingDownError       the service is stopping
├── DeadlineExceededError   the request's deadline has passed
├── ReaderStalledError      the client stopped reading its answer
├── AbortedError            a call of Abort ended the request
├── NotServedError          a method of another's contract that this server does not have
└── ClientDisconnectedError the client ended the call
"""

from __future__ import annotations

from collections.abc import Iterable

from draftwood_model_runner.errors import DraftwoodError, InvalidInputError

_MAX_BYTES = 500


class ContextLengthError(InvalidInputError):
    """The prompt, or prompt and answer together, do not fit the model's context: a shorter prompt would.

    Callers' libraries, such as LiteLLM, know it by OpenAI's words for the limit, and fall back to another model.
    """

    def __init__(self, field: str, problem: str, max_context: int) -> None:
        super().__init__(field, None, f"{problem}; this model's maximum context length is {max_context} tokens")


class UnsupportedByEngineError(InvalidInputError):
    """A request asks for what the engine of this server cannot do.

    Args:
        field, value: of the request.
        engine: its name.
        allowed: what it can do instead, in words.
    """

    def __init__(self, field: str, value: object, engine: str, allowed: str) -> None:
        super().__init__(field, value, f"engine {engine} does not have it; {allowed}")


class QueueFullError(DraftwoodError):
    """The limit of live requests is reached.

    Attributes:
        retry_seconds: estimate of when a slot is free.
    """

    def __init__(self, limit: int, retry_seconds: float) -> None:
        super().__init__(f"{limit} requests are running or waiting, which is the limit; try again later")
        self.retry_seconds = retry_seconds


class TooMuchTextError(DraftwoodError):
    """Too many long texts wait to be tokenized, or grammars to be compiled."""

    def __init__(self, of_tenant: int) -> None:
        super().__init__(f"too many long texts wait to be read, {of_tenant} of this tenant; try again later")


class TooManyWatchesError(DraftwoodError):
    """The limit of open WatchStatus calls is reached."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} calls of WatchStatus are open for this tenant, which is the limit; end one of them")


class MemoriesKeptError(DraftwoodError):
    """An experiment is deleted, and the memories of its arms could not be purged."""

    def __init__(self, experiment: str, arms: Iterable[str], why: Exception) -> None:
        super().__init__(
            f"{experiment} is deleted, and the memories of its arms {', '.join(arms)} may be kept ({why}): nothing"
            " reads them, and they expire; to purge them, create it again with these arms, and delete it"
        )


class ModelNotServedError(DraftwoodError):
    """The request names another model than the one that is served."""

    def __init__(self, model: str, served: str) -> None:
        super().__init__(f"model: {shortened(model)!r} is not served here; this server has {served!r}")


class LoadingError(DraftwoodError):
    """The model is not loaded yet."""

    def __init__(self) -> None:
        super().__init__("the server is loading its model")


class ShuttingDownError(DraftwoodError):
    """The service is stopping; another replica may serve the request."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


class DeadlineExceededError(DraftwoodError):
    """The request's deadline has passed."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the request did not end within its {seconds:.3g} s")


class ReaderStalledError(DraftwoodError):
    """The client stopped reading its answer, or sending its request."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the client read or sent nothing for {seconds:.3g} s")


class AbortedError(DraftwoodError):
    """A call of Abort ended the request."""

    def __init__(self) -> None:
        super().__init__("the request was aborted by a call of Abort")


class NotServedError(DraftwoodError):
    """A method of another's contract that this server does not have."""

    def __init__(self, method: str, reason: str) -> None:
        super().__init__(f"{method} is not served: {reason}")


class ClientDisconnectedError(DraftwoodError):
    """The client ended the call, or its connection broke. No status is sent."""

    def __init__(self) -> None:
        super().__init__("the client ended the call")


def shortened(text: str) -> str:
    """Cut to `_MAX_BYTES` of UTF-8, with "?" for what cannot be encoded. Status and details travel in headers, of which
    clients take up to 8 KiB: the message once, a byte beyond ASCII as three, and twice more in the details, in base64.
    """
    encoded = text.encode(errors="replace")
    whole = len(encoded) <= _MAX_BYTES
    return encoded.decode() if whole else encoded[: _MAX_BYTES - 3].decode(errors="ignore") + "..."
