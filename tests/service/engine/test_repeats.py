"""What a request teaches its tenant's memory: nothing if it says so, and once however often it is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from draftwood.v1 import generation_pb2 as pb
from draftwood_model_runner.request import Request, StopParams
from draftwood_service.engine import repeats
from draftwood_service.engine.repeats import RecentRequests
from tests.model_runner.sequences import make_sequence
from tests.service.fakes import Served, answer, serving


def engine_request(request_id: str = "r") -> Request:
    return make_sequence(request_id, np.zeros(3, np.int32), StopParams(max_tokens=1)).request


async def learned(served: Served, *requests: dict[str, Any]) -> int:
    """How many records the memory has learned after the requests, sent one after another."""
    for fields in requests:
        stop = pb.StopOptions(max_tokens=3)
        assert (await answer(served.stub.Generate(pb.GenerateRequest(stop=stop, **fields)))).finished
    await served.settled()
    return served.memory.counters().learned


FIRST: dict[str, Any] = {"text": "hi", "tenant": "acme", "request_id": "r"}
CASES: dict[str, tuple[list[dict[str, Any]], int]] = {
    "one request": ([FIRST], 1),
    "the same again": ([FIRST, FIRST, FIRST], 1),
    "no id": ([{"text": "hi"}] * 3, 3),
    "another id": ([FIRST, {**FIRST, "request_id": "s"}], 2),
    "another prompt": ([FIRST, {**FIRST, "text": "ho"}], 2),
    "another tenant": ([FIRST, {**FIRST, "tenant": "other"}], 2),
    "not to be learned": ([{**FIRST, "drafting": pb.DraftOptions(learn=False)}], 0),
    "to be learned the second time": ([{**FIRST, "drafting": pb.DraftOptions(learn=False)}, FIRST], 1),
    "to be learned": ([{**FIRST, "drafting": pb.DraftOptions(learn=True)}], 1),
    "drafting off": ([{**FIRST, "drafting": pb.DraftOptions(enabled=False)}], 0),
}


@pytest.mark.parametrize("case", CASES)
async def test_what_is_learned(case: str) -> None:
    requests, expected = CASES[case]
    async with serving() as served:
        assert await learned(served, *requests) == expected


async def test_several_samples_are_one_request() -> None:
    async with serving() as served:
        sampling = pb.SamplingOptions(n=3, temperature=1.0)
        assert await learned(served, {**FIRST, "sampling": sampling}, {**FIRST, "sampling": sampling}) == 3


def test_what_wrote_nothing_teaches_when_it_is_repeated() -> None:
    recent, one = RecentRequests(), engine_request()
    assert not recent.is_repeated(one)
    recent.forget(one)
    assert not recent.is_repeated(one)
    assert recent.is_repeated(one)


def test_they_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "_MOST", 2)
    recent = RecentRequests()
    first, *others = [engine_request(request_id=name) for name in "abc"]
    assert not any(recent.is_repeated(one) for one in (first, *others))
    assert recent.is_repeated(others[1])
    assert not recent.is_repeated(first)
