"""The service as @grpc/grpc-js and @grpc/proto-loader see it. `make test-system` installs them into build/node."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from draftwood_model_runner.errors import InvalidValueError
from draftwood_model_runner.request import GrammarKind
from draftwood_model_runner.sequence import Grammar
from tests.service.fakes import FakeGrammars, FakeModel, Served, serving

REPOSITORY = Path(__file__).resolve().parents[3]
MODULES = REPOSITORY / "build" / "node" / "node_modules"
SCRIPT = Path(__file__).parent / "node" / "client.js"
NODE = shutil.which("node")
INVALID_ARGUMENT, NOT_FOUND = 3, 5

pytestmark = pytest.mark.skipif(
    NODE is None or not (MODULES / "@grpc" / "grpc-js").is_dir(),
    reason="node or its packages are missing; `make build/node/.installed` installs them where npm is",
)


async def ask(served: Served, method: str, request: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages, and the status last."""
    assert NODE is not None
    process = await asyncio.create_subprocess_exec(
        *(NODE, str(SCRIPT), str(REPOSITORY / "protos"), served.server.address, method),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={"PATH": os.environ["PATH"], "NODE_PATH": str(MODULES)},
    )
    async with asyncio.timeout(30):
        output, _ = await process.communicate(json.dumps(request).encode())
    assert process.returncode == 0
    return [json.loads(line) for line in output.splitlines()]


async def test_an_answer() -> None:
    async with serving() as served:
        *events, status = await ask(served, "Generate", {"text": "hi", "stop": {"maxTokens": 3}})
        assert status["code"] == 0
        assert [event["event"] for event in events] == ["started", *["delta"] * (len(events) - 2), "finished"]
        assert events[0]["started"]["promptTokens"] == 2
        assert sum(len(event["delta"]["tokenIds"]) for event in events[1:-1]) == 3
        assert events[-1]["finished"]["reason"] == "FINISH_REASON_LENGTH"


async def test_a_zero_is_not_an_unset_field() -> None:
    async with serving() as served:
        *_, status = await ask(served, "Generate", {"text": "hi", "stop": {"maxTokens": 0}})
        assert status["code"] == INVALID_ARGUMENT
        assert status["details"].startswith("stop.max_tokens: 0 is not allowed")


class EchoingGrammars(FakeGrammars):
    """Refuses every grammar, and repeats it in the reason."""

    def compile(self, kind: GrammarKind, text: str) -> Grammar:
        raise InvalidValueError(f"format.{kind.value}", text, f"it cannot be compiled: {text}")


def formatted(**options: str) -> dict[str, Any]:
    return {"text": "a", "format": options}


LONG, BEYOND_ASCII = "a" * 9_000, "😀" * 9_000
BAD: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "other model": ("Generate", {"text": "hi", "model": "other"}, NOT_FOUND, "model: 'other' is not served here"),
    "long model": ("Tokenize", {"text": "hi", "model": "😀" * 100_000}, NOT_FOUND, "model: '😀"),
    "long role": (
        "Generate",
        {"chat": {"messages": [{"role": "u" * 1_000_000, "content": "hi"}]}},
        INVALID_ARGUMENT,
        "chat.messages[0].role: must have 1 to 64 characters",
    ),
    "strategy": ("Generate", {"text": "a", "drafting": {"strategy": LONG}}, INVALID_ARGUMENT, "drafting.strategy: "),
    "regex": ("Generate", formatted(regex=LONG), INVALID_ARGUMENT, "format.regex: "),
    "regex beyond ASCII": ("Generate", formatted(regex=BEYOND_ASCII), INVALID_ARGUMENT, "format.regex: "),
    "grammar": ("Generate", formatted(lark=BEYOND_ASCII), INVALID_ARGUMENT, "format.lark: "),
}


@pytest.mark.parametrize("case", BAD)
async def test_what_is_echoed_is_cut(case: str) -> None:
    method, request, code, text = BAD[case]
    async with serving(model=FakeModel(grammars=EchoingGrammars())) as served:
        [status] = await ask(served, method, request)
        assert (status["code"], status["details"][: len(text)]) == (code, text)
        assert len(status["details"].encode()) <= 500
        assert "grpc-status-details-bin" in status["trailers"]
