"""Behaviour of both clients, blocking and asyncio: answers, errors, retries, deadlines."""

from __future__ import annotations

import pickle
import time
from typing import Any

import grpc
import pytest

from draftwood.v1 import generation_pb2 as pb
from draftwood_client import (
    ChatMessage,
    DeadlineError,
    DraftwoodError,
    FieldViolation,
    FinishReason,
    InternalError,
    InvalidRequestError,
    Messages,
    NotFoundError,
    RequestCancelledError,
    ResourceExhaustedError,
    RetryPolicy,
    StatusError,
    UnavailableError,
)
from tests.client.conftest import Ask
from tests.client.fake_server import FakeServer, answers, fails, hangs, reason, retry_in, silent, unfinished, violation

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


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


def test_what_a_closing_server_cancels_is_sent_again(ask: Ask, server: FakeServer) -> None:
    server.script = [fails(grpc.StatusCode.CANCELLED, "CANCELLED"), answers("ok")]
    ask()
    first, again = [request.request_id for request in server.requests]
    assert first == again
    server.script = [fails(grpc.StatusCode.CANCELLED, "CANCELLED")]
    with pytest.raises(RequestCancelledError):
        ask(retry=RetryPolicy(max_attempts=2, initial_backoff=0.01))
    assert len(server.requests) == 4


def test_error_details_are_decoded(ask: Ask, server: FakeServer) -> None:
    server.script = [
        fails(
            grpc.StatusCode.INVALID_ARGUMENT,
            "sampling.temperature: -1 is not allowed",
            reason("INVALID_VALUE", request_id="r-7", limit="100"),
            violation("sampling.temperature", "must lie in [0, 100]"),
        )
    ]
    with pytest.raises(InvalidRequestError) as caught:
        ask(temperature=-1)
    error = caught.value
    assert str(error) == "sampling.temperature: -1 is not allowed"
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.reason == "INVALID_VALUE"
    assert error.metadata == {"request_id": "r-7", "limit": "100"}
    assert error.request_id == "r-7"
    assert error.violations == (FieldViolation("sampling.temperature", "must lie in [0, 100]"),)
    assert isinstance(error.__cause__, grpc.RpcError)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.NOT_FOUND, NotFoundError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ResourceExhaustedError),
        (grpc.StatusCode.DATA_LOSS, InternalError),
    ],
)
def test_each_status_has_its_type_and_is_not_retried(
    ask: Ask, server: FakeServer, code: grpc.StatusCode, kind: type[StatusError]
) -> None:
    server.script = [fails(code, "no")]
    with pytest.raises(kind, match=f"{server.target}: no") as caught:
        ask(request_id="mine")
    assert isinstance(caught.value, DraftwoodError)
    assert (caught.value.code, caught.value.request_id) == (code, "mine")
    assert len(server.requests) == 1


def test_unavailable_is_retried_with_the_same_id_after_what_the_server_asks_for(ask: Ask, server: FakeServer) -> None:
    full = fails(UNAVAILABLE, "full", reason("QUEUE_FULL"), retry_in(60_000), pushback="100")
    server.script = [full, full, answers("ok")]
    begun = time.monotonic()
    assert ask("x" * 1_000_000).text == "ok"
    assert 0.2 <= time.monotonic() - begun < 5
    ask()
    first, second, third, other = [request.request_id for request in server.requests]
    assert first == second == third != other
    assert min(len(first), len(other)) >= 32


def test_what_is_too_large_is_told_with_both_sizes(ask: Ask, server: FakeServer) -> None:
    with pytest.raises(StatusError, match=r": the request has 5000\d\d\d bytes, and the server takes at most 4194304$"):
        ask("x" * 5_000_000)
    server.script = [answers("x" * 15 * 2**20), answers("x" * 17_000_000)]
    assert len(ask().text) == 15 * 2**20
    said = r": the answer has 17\d{6} bytes, and this client takes at most 16777216; raise it by channel_options="
    with pytest.raises(StatusError, match=said):
        ask()


def test_retries_end(ask: Ask, server: FakeServer) -> None:
    server.script = [fails(UNAVAILABLE, "full", reason("QUEUE_FULL"), retry_in(20))]
    with pytest.raises(UnavailableError, match="full") as caught:
        ask()
    assert (caught.value.reason, caught.value.retry_after) == ("QUEUE_FULL", 0.02)
    assert len(server.requests) == 3


@pytest.mark.parametrize("pushback", ["-1", "soon"])
def test_the_server_can_forbid_retries(ask: Ask, server: FakeServer, pushback: str) -> None:
    server.script = [fails(UNAVAILABLE, "never", pushback=pushback), answers("ok")]
    with pytest.raises(UnavailableError) as caught:
        ask()
    assert not caught.value.retryable
    assert len(server.requests) == 1


def test_a_retry_that_would_come_too_late_is_not_made(ask: Ask, server: FakeServer) -> None:
    """The server, which knows the deadline, forbids it to gRPC."""
    server.script = [fails(UNAVAILABLE, "full", retry_in(60_000), pushback="-1"), answers("ok")]
    with pytest.raises(UnavailableError) as caught:
        ask(timeout=20)
    assert (caught.value.retryable, caught.value.retry_after) == (True, 60.0)
    assert len(server.requests) == 1


def test_an_answer_that_broke_off_is_not_retried(ask: Ask, server: FakeServer) -> None:
    server.script = [fails(UNAVAILABLE, "going down", reason("SHUTTING_DOWN"), after=["half an"]), answers("ok")]
    with pytest.raises(UnavailableError, match="going down") as caught:
        ask()
    assert caught.value.request_id == server.requests[0].request_id
    assert len(server.requests) == 1


@pytest.mark.parametrize("behaviour", [hangs("begun"), silent], ids=["after a delta", "before any event"])
def test_the_deadline_ends_both_sides(ask: Ask, server: FakeServer, behaviour: object) -> None:
    server.script = [behaviour]  # type: ignore[list-item]
    begun = time.monotonic()
    with pytest.raises(DeadlineError, match=rf"{server.target}: no complete answer within 0\.6 s"):
        ask(timeout=0.6)
    assert 0.55 < time.monotonic() - begun < 5
    assert server.cancelled.wait(5)


def test_the_deadline_counts_all_attempts(ask: Ask, server: FakeServer) -> None:
    server.script = [fails(UNAVAILABLE, "full", pushback="200"), silent]
    with pytest.raises(DeadlineError, match=r"within 0\.8 s"):
        ask(timeout=0.8)
    _, left = server.seconds_left
    assert left is not None
    assert left < 0.65  # of the second attempt


def test_a_stream_without_an_end_is_an_error(ask: Ask, server: FakeServer) -> None:
    server.script = [unfinished]
    with pytest.raises(InternalError, match="without Finished"):
        ask()


def test_details_that_cannot_be_read_do_not_hide_the_error(ask: Ask, server: FakeServer) -> None:
    def garbled(request: pb.GenerateRequest, context: grpc.ServicerContext, _: FakeServer) -> object:
        context.set_trailing_metadata((("grpc-status-details-bin", b"\xff\xff\xff"),))
        context.abort(grpc.StatusCode.NOT_FOUND, "no such thing")

    server.script = [garbled]  # type: ignore[list-item]
    with pytest.raises(NotFoundError, match="no such thing"):
        ask()


def test_errors_survive_pickling(ask: Ask, server: FakeServer) -> None:
    server.script = [fails(UNAVAILABLE, "full", reason("QUEUE_FULL"), retry_in(20))]
    with pytest.raises(UnavailableError) as caught:
        ask(request_id="r")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is UnavailableError
    assert (
        repr(copy)
        == repr(caught.value)
        == ("UnavailableError('full', code=UNAVAILABLE, reason='QUEUE_FULL', request_id='r', retry_after=0.02)")
    )
