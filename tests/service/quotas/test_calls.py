"""Limits as callers see them: status, details, and what is given back when a request ends."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from draftwood.v1 import generation_pb2 as pb
from draftwood_client import AsyncClient, QuotaExceededError
from tests.service.fakes import answer, serving


def ask(tokens: int = 4, text: str = "ab") -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, stop=pb.StopOptions(max_tokens=tokens))


async def test_status_and_details() -> None:
    async with serving(requests_per_minute=1) as served:
        assert (await answer(served.stub.Generate(ask()))).finished
        error = (await answer(served.stub.Generate(ask()))).status
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        status = rpc_status.from_call(error)
        info, retry, quota = (
            error_details_pb2.ErrorInfo(),
            error_details_pb2.RetryInfo(),
            error_details_pb2.QuotaFailure(),
        )
        for detail in status.details:
            for message in (info, retry, quota):
                detail.Unpack(message)
        assert info.reason == "QUOTA_EXCEEDED"
        assert 50 < retry.retry_delay.seconds <= 61
        assert [one.subject for one in quota.violations] == ["requests_per_minute"]


async def test_the_client_raises_a_typed_error_and_does_not_retry() -> None:
    async with serving(tokens_per_minute=10) as served, AsyncClient(served.server.address) as client:
        await client.generate("ab", max_tokens=8)
        for tokens, retryable in ((1, True), (100, False)):
            with pytest.raises(QuotaExceededError) as caught:
                await client.generate("ab", max_tokens=tokens)
            assert caught.value.violations[0].field == "tokens_per_minute"
            assert caught.value.retryable is retryable
            assert (caught.value.retry_after is not None) is retryable


async def test_ended_requests_give_back_their_place_and_tokens() -> None:
    async with serving(concurrency=1, tokens_per_minute=1000) as served:
        for _ in range(5):
            assert (await answer(served.stub.Generate(ask()))).finished
        served.engine.gate.clear()
        running = served.stub.Generate(ask(900))
        await running.read()
        assert (await answer(served.stub.Generate(ask()))).status.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        running.cancel()
        served.engine.gate.set()
        await served.settled()
        served.engine.sequence_error = ValueError("broken")
        assert (await answer(served.stub.Generate(ask(800)))).status.code() is grpc.StatusCode.INTERNAL
        served.engine.sequence_error = None
        assert (await answer(served.stub.Generate(ask(800)))).finished
