"""What a memory learns from a request: nothing if it says so, and once however often it is sent."""

from __future__ import annotations

from typing import Any

import pytest

from draftwood.v1 import generation_pb2 as pb
from tests.service.fakes import Served, answer, serving


async def learned(served: Served, *requests: dict[str, Any]) -> int:
    """How many records the memory has learned after the requests, sent one after another."""
    for fields in requests:
        stop = pb.StopOptions(max_tokens=3)
        assert (await answer(served.stub.Generate(pb.GenerateRequest(stop=stop, **fields)))).finished
    await served.assert_idle()
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
    "several samples": ([{**FIRST, "sampling": pb.SamplingOptions(n=3, temperature=1.0)}] * 2, 3),
}


@pytest.mark.parametrize("case", CASES)
async def test_what_is_learned(case: str) -> None:
    requests, expected = CASES[case]
    async with serving() as served:
        assert await learned(served, *requests) == expected
