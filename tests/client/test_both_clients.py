"""Behaviour of both clients, blocking and asyncio: answers, errors, retries, deadlines."""

from __future__ import annotations

import asyncio
import pickle
import time
from typing import Any

import grpc
import pytest

from draftwood.v1 import generation_pb2 as pb
from draftwood_client import (
    ChatMessage,
    DeadlineError,
    FieldViolation,
    FinishReason,
    InvalidRequestError,
    Messages,
    StatusError,
)
from tests.client.conftest import OWN_CONNECTION, Ask, Connect
from tests.client.fake_server import (
    WAIT_SECONDS,
    Behaviour,
    Events,
    FakeServer,
    answers,
    delta,
    fails,
    hangs,
    reason,
    retry_in,
    silent,
    started,
    violation,
)

CODE = grpc.StatusCode


def test_an_answer_is_joined_from_its_deltas(ask: Ask, server: FakeServer) -> None:
    server.script = [answers("Hello", ", wörld", stop_string="END")]
    completion = ask(token_details=True, request_id="r-1", tenant="acme")
    assert completion.text == "Hello, wörld"
    assert completion.token_ids == (5, 7)
    assert completion.details == (pb.TokenDetail(text="Hello"), pb.TokenDetail(text=", wörld", drafted=True))
    assert completion.finish_reason is FinishReason.STOP
    assert completion.matched_stop == "END"
    assert completion.usage == pb.Usage(prompt_tokens=3, completion_tokens=2)
    assert (completion.timings.queue, completion.timings.total) == (0.25, 2.0)
    assert completion.drafting.by_source == {"trie": pb.SourceStatistics(draft_tokens=8, accepted_tokens=2)}
    assert completion.drafting.accepted_by_depth == (2, 1)
    assert completion.drafting.acceptance_rate == 0.25
    assert completion.drafting.draft_time == 0.125
    assert (completion.request_id, completion.tenant, completion.model) == ("r-1", "acme", "fake")
    assert repr(completion) == (
        "Completion('Hello, wörld', 2 tokens, finish_reason='stop', matched_stop='END',"
        " mean_acceptance_length=1.50, 2.000 s, request_id='r-1')"
    )


SAMPLING: dict[str, Any] = {
    **{"temperature": 0.5, "top_k": 5, "top_p": 0.75, "min_p": 0.25, "seed": 2**64 - 1},
    **{"repetition_penalty": 1.5, "presence_penalty": -0.5, "frequency_penalty": 0.25},
}
OUTPUT: dict[str, Any] = {"token_details": True, "include_special_tokens": True, "raw_text": True}
LIMITS: dict[str, Any] = {"max_tokens": 9, "min_tokens": 1, "ignore_eos": True}


def turn(role: str, text: str) -> pb.ChatMessage:
    return pb.ChatMessage(role=role, content=[pb.ContentPart(text=text)])


def test_every_option_reaches_its_field(ask: Ask, server: FakeServer) -> None:
    messages: Messages = [ChatMessage("system", "Be brief."), {"role": "user", "content": "Why?"}]
    stops: dict[str, Any] = {"stop": ["a", "b"], "stop_token_ids": [7, 8], **LIMITS}
    drafts: dict[str, Any] = {"drafting": False, "strategy": "trie", "max_draft_nodes": 0}
    ids: dict[str, Any] = {"tenant": "acme", "request_id": "r", "session": "s"}
    ask(messages, **ids, **SAMPLING, **stops, **drafts, **OUTPUT)
    [request] = server.requests
    turns = [turn("system", "Be brief."), turn("user", "Why?")]
    assert request == pb.GenerateRequest(
        chat=pb.Chat(messages=turns),
        sampling=pb.SamplingOptions(**SAMPLING),
        stop=pb.StopOptions(strings=["a", "b"], token_ids=[7, 8], **LIMITS),
        drafting=pb.DraftOptions(enabled=False, strategy="trie", max_nodes=0),
        output=pb.OutputOptions(**OUTPUT),
        **ids,
    )


def test_what_is_not_asked_for_stays_unset(ask: Ask, server: FakeServer) -> None:
    ask([1, 2, 3], temperature=None, stop=None)
    [request] = server.requests
    assert request == pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), request_id=request.request_id)


def test_unavailable_is_retried_with_the_same_id_after_what_the_server_asks_for(ask: Ask, server: FakeServer) -> None:
    full = fails(CODE.UNAVAILABLE, "full", reason("QUEUE_FULL"), retry_in(600_000), pushback="100")
    server.script = [full, full, answers("ok")]
    begun = time.monotonic()
    assert ask("x" * 1_000_000).text == "ok"
    assert time.monotonic() - begun >= 0.2
    server.script += [fails(CODE.CANCELLED, "CANCELLED"), answers("ok")]  # as a server that closes
    assert ask().text == "ok"
    first, second, third, other, again = [request.request_id for request in server.requests]
    assert first == second == third != other == again
    assert min(len(first), len(other)) >= 32


def test_what_is_too_large_is_told_with_both_sizes(ask: Ask, server: FakeServer) -> None:
    with pytest.raises(StatusError, match=r": the request has 5000\d\d\d bytes, and the server takes at most 4194304$"):
        ask("x" * 5_000_000)
    server.script = [answers("x" * 15 * 2**20), answers("x" * 17_000_000)]
    assert len(ask().text) == 15 * 2**20
    said = r": the answer has 17\d{6} bytes, and this client takes at most 16777216; raise it by channel_options="
    with pytest.raises(StatusError, match=said):
        ask()


def test_error_details_are_decoded(ask: Ask, server: FakeServer) -> None:
    wrong = violation("sampling.temperature", "must lie in [0, 100]")
    info = reason("INVALID_VALUE", request_id="r-7", limit="100")
    server.script = [fails(CODE.INVALID_ARGUMENT, "sampling.temperature: -1 is not allowed", info, wrong)]
    with pytest.raises(InvalidRequestError) as caught:
        ask(temperature=-1)
    error = caught.value
    assert str(error) == "sampling.temperature: -1 is not allowed"
    assert (error.code, error.reason, error.request_id) == (CODE.INVALID_ARGUMENT, "INVALID_VALUE", "r-7")
    assert error.metadata == {"request_id": "r-7", "limit": "100"}
    assert error.violations == (FieldViolation("sampling.temperature", "must lie in [0, 100]"),)
    assert isinstance(error.__cause__, grpc.RpcError)


def unfinished(request: pb.GenerateRequest, context: Any, server: FakeServer) -> Events:
    """Violates the protocol: ends with OK, but without Finished."""
    yield started(request)
    yield delta(request, "half", drafted=False)


def garbled(request: pb.GenerateRequest, context: Any, server: FakeServer) -> Events:
    context.set_trailing_metadata((("grpc-status-details-bin", b"\xff\xff\xff"),))
    context.abort(CODE.NOT_FOUND, "no such thing")
    yield from ()


SPENT = fails(CODE.RESOURCE_EXHAUSTED, "no")
FULL = fails(CODE.UNAVAILABLE, "full", reason("QUEUE_FULL"), retry_in(20))
TOO_LATE = fails(CODE.UNAVAILABLE, "full", retry_in(60_000), pushback="-1")  # the server knows the deadline
BROKEN = fails(CODE.UNAVAILABLE, "going down", reason("SHUTTING_DOWN"), after=["half an"])
ERRORS = [
    # what each attempt meets; the error as it is shown, whether it may be retried, and after how many attempts it comes
    (fails(CODE.NOT_FOUND, "no"), "NotFoundError('TARGET: no', code=NOT_FOUND, ID)", False, 1),
    (SPENT, "ResourceExhaustedError('TARGET: no', code=RESOURCE_EXHAUSTED, ID)", False, 1),
    (fails(CODE.DATA_LOSS, "no"), "InternalError('TARGET: no', code=DATA_LOSS, ID)", False, 1),
    (FULL, "UnavailableError('full', code=UNAVAILABLE, reason='QUEUE_FULL', ID, retry_after=0.02)", True, 3),
    (fails(CODE.CANCELLED, ""), "RequestCancelledError('TARGET: CANCELLED', code=CANCELLED, ID)", False, 3),
    (fails(CODE.UNAVAILABLE, "x", pushback="-1"), "UnavailableError('TARGET: x', code=UNAVAILABLE, ID)", False, 1),
    (fails(CODE.UNAVAILABLE, "x", pushback="soon"), "UnavailableError('TARGET: x', code=UNAVAILABLE, ID)", False, 1),
    (TOO_LATE, "UnavailableError('TARGET: full', code=UNAVAILABLE, ID, retry_after=60.0)", True, 1),
    (BROKEN, "UnavailableError('going down', code=UNAVAILABLE, reason='SHUTTING_DOWN', ID)", True, 1),
    (unfinished, "InternalError('the server ended the stream without Finished', code=INTERNAL, ID)", False, 1),
    (garbled, "NotFoundError('TARGET: no such thing', code=NOT_FOUND, ID)", False, 1),
]


@pytest.mark.parametrize(("behaviour", "shown", "retryable", "attempts"), ERRORS)
def test_errors_have_types_end_the_retries_and_can_be_pickled(
    ask: Ask, server: FakeServer, behaviour: Behaviour, shown: str, retryable: bool, attempts: int
) -> None:
    server.script = [behaviour]
    with pytest.raises(StatusError) as caught:
        ask(request_id="mine")
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert repr(error) == shown.replace("TARGET", server.target).replace("ID", "request_id='mine'")
        assert error.retryable == retryable
    assert [request.request_id for request in server.requests] == ["mine"] * attempts


@pytest.mark.parametrize("behaviour", [hangs("begun"), silent], ids=["after a delta", "before any event"])
async def test_the_deadline_ends_both_sides(connect: Connect, server: FakeServer, behaviour: Behaviour) -> None:
    server.script = [behaviour]
    async with connect(server.target, channel_options=OWN_CONNECTION) as client:
        await client.model_info()  # connects, which takes time as well
        begun = time.monotonic()
        with pytest.raises(DeadlineError, match=rf"{server.target}: no complete answer within 0\.9 s"):
            await client.generate("hi", timeout=0.9)
        assert time.monotonic() - begun > 0.85
        assert await asyncio.to_thread(server.cancelled.wait, WAIT_SECONDS)


def test_the_deadline_counts_all_attempts(ask: Ask, server: FakeServer) -> None:
    server.script = [fails(CODE.UNAVAILABLE, "full", pushback="500"), answers("ok")]
    ask(timeout=9)
    first, second = server.seconds_left
    assert first is not None
    assert second is not None
    assert second < first - 0.25
