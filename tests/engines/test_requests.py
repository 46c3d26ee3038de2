"""Limits, ends and order of requests, on every engine."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from draftwood.v1 import generation_pb2 as pb
from draftwood.v1 import generation_pb2_grpc as pb_grpc
from draftwood_client import Client, DeadlineError, InvalidRequestError, PermissionDeniedError, QuotaExceededError
from tests.engines.servers import CONTEXT, SLOTS, Served, until

LONG: Any = {"max_tokens": 200, "ignore_eos": True, "drafting": False}


def test_a_deadline_ends_a_request_and_frees_its_slot(client: Client, served: Served) -> None:
    with pytest.raises(DeadlineError):
        client.generate("A long story:", timeout=0.15, n=SLOTS, temperature=1.0, **LONG)
    until(served.idle)
    assert client.generate("x", max_tokens=2).token_ids


def test_a_cancelled_request_frees_its_slot(client: Client, served: Served) -> None:
    for _ in range(2 * SLOTS):
        with client.stream("A long story:", **LONG) as stream:
            next(stream)
    until(served.idle)
    assert client.generate("x", max_tokens=2).token_ids


def test_more_requests_than_slots_wait_and_all_end(client: Client) -> None:
    with ThreadPoolExecutor(12) as threads:
        answers = [threads.submit(client.generate, f"Question {i}:", max_tokens=20, ignore_eos=True) for i in range(24)]
        assert all(len(answer.result().token_ids) == 20 for answer in answers)


def test_a_reader_that_stops_holds_up_nobody(client: Client, served: Served) -> None:
    """Its answer is bounded by its length, whether or not the engine pauses it."""
    with grpc.insecure_channel(served.target) as channel:
        stub = pb_grpc.GenerationServiceStub(channel)
        stop = pb.StopOptions(max_tokens=200, ignore_eos=True)
        calls = [
            stub.GenerateStream(pb.GenerateRequest(text="A long story:", stop=stop, tenant="stopped"))
            for _ in range(SLOTS)
        ]
        for call in calls:
            next(call)
        assert client.generate("x", max_tokens=5, tenant="reads", timeout=60).token_ids
        assert [*calls[0]][-1].finished.usage.completion_tokens == 200
        for call in calls:
            call.cancel()
    until(served.idle)


def test_tenants_share_the_engine_by_weight(client: Client, served: Served) -> None:
    """Many requests of one tenant wait when another one's four come: those are not behind them."""
    ended: list[str] = []
    lock = threading.Lock()

    def ask(tenant: str) -> None:
        client.generate("A story:", tenant=tenant, max_tokens=60, ignore_eos=True, drafting=False)
        with lock:
            ended.append(tenant)

    with ThreadPoolExecutor(28) as threads:
        waiting = [threads.submit(ask, "greedy-tenant") for _ in range(24)]
        until(lambda: served.load().waiting >= 12)
        waiting += [threads.submit(ask, "late") for _ in range(4)]
        for one in waiting:
            one.result()
    last = max(i for i, tenant in enumerate(ended) if tenant == "late")
    assert last < len(ended) - 4


def test_quotas_overrides_and_defaults_of_tenants(client: Client) -> None:
    with client.stream("x", tenant="limited", n=SLOTS, temperature=1.0, **LONG) as stream:
        next(stream)
        with pytest.raises(QuotaExceededError):
            client.generate("x", tenant="limited", max_tokens=2)
    with pytest.raises(PermissionDeniedError):
        client.generate("x", tenant="fixed", max_tokens=2, strategy="none")
    assert client.generate("x", tenant="fixed", max_tokens=2).drafting.strategy == "trie"
    answers = {client.generate("Once upon a time", tenant="warm-blooded", max_tokens=16).token_ids for _ in range(4)}
    assert len(answers) > 1
    assert client.generate("x", tenant="warm-blooded", max_tokens=2, temperature=0.0).seed is None


def test_what_does_not_fit_is_refused(client: Client) -> None:
    wrong: list[tuple[list[int], Any]] = [([5] * CONTEXT, {}), ([5] * 200, {"max_tokens": 100}), ([10**6], {})]
    for prompt, options in wrong:
        with pytest.raises(InvalidRequestError):
            client.generate(prompt, **options)
    assert len(client.generate([5] * 200, max_tokens=CONTEXT - 200, ignore_eos=True).token_ids) == CONTEXT - 200
