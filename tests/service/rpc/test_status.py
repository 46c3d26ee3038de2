"""The table from exception to status."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from draftwood_model_runner.errors import EngineStoppedError, InvalidValueError, ModelError
from draftwood_service.errors import (
    DeadlineExceededError,
    ModelNotServedError,
    QueueFullError,
    ReaderStalledError,
    ShuttingDownError,
    rule_for,
    to_status,
)

TABLE = [
    (ModelNotServedError("x", "y"), grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND"),
    (InvalidValueError("a.b", 3, "it must be 4"), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_VALUE"),
    (QueueFullError(5, 0.25), grpc.StatusCode.UNAVAILABLE, "QUEUE_FULL"),
    (ShuttingDownError(), grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN"),
    (EngineStoppedError("secret"), grpc.StatusCode.UNAVAILABLE, "ENGINE_STOPPED"),
    (DeadlineExceededError(1.5), grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    (ReaderStalledError(1.5), grpc.StatusCode.ABORTED, "READER_STALLED"),
    (ModelError("secret"), grpc.StatusCode.INTERNAL, "MODEL_FAILED"),
    (KeyError("secret"), grpc.StatusCode.INTERNAL, "INTERNAL"),
]


@pytest.mark.parametrize(("error", "code", "reason"), TABLE, ids=lambda value: str(value)[:20])
def test_status(error: Exception, code: grpc.StatusCode, reason: str) -> None:
    found, text, trailing = to_status(error, "mine")
    assert found is code
    assert "secret" not in text
    metadata = dict(trailing)
    packed = metadata["grpc-status-details-bin"]
    assert isinstance(packed, bytes)
    status = status_pb2.Status.FromString(packed)
    assert (status.code, status.message) == (code.value[0], text)
    info, retry, bad = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain, info.metadata["request_id"]) == (reason, "draftwood", "mine")
    assert any(detail.Unpack(retry) for detail in status.details) is (code is grpc.StatusCode.UNAVAILABLE)
    assert ("grpc-retry-pushback-ms" in metadata) is (code is grpc.StatusCode.UNAVAILABLE)
    assert any(detail.Unpack(bad) for detail in status.details) is (code is grpc.StatusCode.INVALID_ARGUMENT)
    if isinstance(error, QueueFullError):
        assert 250 <= int(metadata["grpc-retry-pushback-ms"]) <= 313
        assert retry.retry_delay.ToMilliseconds() == 250


@pytest.mark.parametrize(("remaining", "expected"), [(None, {100, 125}), (0.13, {100, 125}), (0.1, {-1}), (0.0, {-1})])
def test_a_retry_that_would_come_after_the_deadline_is_forbidden(remaining: float | None, expected: set[int]) -> None:
    sent = [
        int(dict(to_status(QueueFullError(5, 0.1), "mine", remaining)[2])["grpc-retry-pushback-ms"]) for _ in range(50)
    ]
    assert min(expected) <= min(sent) <= max(sent) <= max(expected)
    assert (len(set(sent)) > 1) is (len(expected) > 1)


def test_no_client_is_asked_to_come_back_at_once() -> None:
    assert int(dict(to_status(QueueFullError(5, 0.0), "mine")[2])["grpc-retry-pushback-ms"]) >= 10


def test_a_subclass_has_the_rule_of_its_base() -> None:
    class NarrowError(ModelError):
        pass

    assert rule_for(NarrowError()) is rule_for(ModelError())
