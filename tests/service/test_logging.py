"""Log lines: one for each request, without text of prompt or answer."""

from __future__ import annotations

import io
import json
import logging
from typing import Literal

import pytest
import structlog
from structlog.testing import capture_logs

from draftwood.v1 import generation_pb2 as pb
from draftwood_model_runner.errors import ModelError
from draftwood_service.logging_config import configure_logging
from tests.service.fakes import answer, serving
from tests.service.rpc.test_endings import ask


def lines(logged: io.StringIO, event: str) -> list[dict[str, object]]:
    return [line for text in logged.getvalue().splitlines() if (line := json.loads(text))["event"] == event]


async def test_one_line_for_each_request(logged: io.StringIO) -> None:
    async with serving() as served:
        await answer(served.stub.GenerateStream(ask("secret words", 7, request_id="mine", tenant="acme")))
        await answer(served.stub.GenerateStream(pb.GenerateRequest(request_id="bad")))
    good, bad = lines(logged, "request")
    assert (good["request_id"], good["tenant"], good["strategy"], good["outcome"]) == (
        "mine",
        "acme",
        "hybrid",
        "length",
    )
    assert (good["prompt_tokens"], good["completion_tokens"], good["acceptance_length"]) == (12, 7, 1.75)
    assert all(isinstance(good[key], float) for key in ("queue_ms", "prefill_ms", "decode_ms", "total_ms"))
    assert "secret" not in json.dumps(good)
    assert (bad["request_id"], bad["outcome"]) == ("bad", "invalid_value")


@pytest.mark.parametrize("style", ["json", "console"])
async def test_a_failure_is_logged_with_its_traceback_and_without_prompts(
    style: Literal["json", "console"], logged: io.StringIO
) -> None:
    configure_logging("info", style, logged)
    async with serving() as served:
        served.engine.sequence_error = ModelError("what went wrong")
        await answer(served.stub.GenerateStream(ask("secret words", request_id="mine")))
    text = logged.getvalue()
    assert "what went wrong" in text
    assert "relay" in text
    assert "mine" in text
    assert "secret" not in text


def test_lines_of_other_packages_look_the_same(logged: io.StringIO) -> None:
    logging.getLogger("somewhere").warning("plain %s", "words")
    structlog.get_logger("here").info("quiet")
    [line] = lines(logged, "plain words")
    assert (line["level"], line["logger"]) == ("warning", "somewhere")


def test_a_logger_that_has_logged_follows_what_is_configured_later(logged: io.StringIO) -> None:
    log = structlog.get_logger("here")
    log.warning("before")
    later = io.StringIO()
    configure_logging("info", "json", later)
    log.warning("after")
    with capture_logs() as captured:
        log.warning("captured")
    assert [line["event"] for line in captured] == ["captured"]
    assert [bool(lines(stream, event)) for stream in (logged, later) for event in ("before", "after")] == [1, 0, 0, 1]
