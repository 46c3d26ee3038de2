"""The examples in the client's README run as they are."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import pytest

from tests.client.fake_server import FakeServer, answers, fails, reason, retry_in, violation

README = Path(__file__).resolve().parents[2] / "clients" / "python" / "README.md"


def examples() -> list[tuple[str, str]]:
    """Heading and code of each Python example."""
    found: list[tuple[str, str]] = []
    for part in README.read_text().split("\n## ")[1:]:
        heading = part.partition("\n")[0]
        found += [(heading, code) for code in re.findall(r"```python\n(.*?)```", part, re.DOTALL)]
    return found


BAD = fails(
    grpc.StatusCode.INVALID_ARGUMENT,
    "sampling.temperature: -1 is not allowed",
    reason("INVALID_VALUE"),
    violation("sampling.temperature", "-1 is not allowed"),
)
FULL = fails(grpc.StatusCode.UNAVAILABLE, "full", reason("QUEUE_FULL", request_id="r"), retry_in(50), pushback="-1")
SHOWN = {
    "First call": [(answers("It is", " here."), "It is here.\n1.5\n")],
    "Streaming": [(answers("It is", " here."), "It is here.")],
    "Errors": [(BAD, "sampling.temperature -1 is not allowed\n"), (FULL, "QUEUE_FULL 0.05 r\n")],
    "Credentials": [(answers("It is", " here."), "It is here.\n")],
    "Retries and several servers": [(answers("It is", " here."), "\n")],
}


@pytest.mark.parametrize(("heading", "code"), examples(), ids=[heading for heading, _ in examples()])
def test_example(heading: str, code: str, server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    for behaviour, shown in SHOWN[heading]:
        server.script = [behaviour]
        assert "127.0.0.1:50051" in code
        exec(compile(code.replace("127.0.0.1:50051", server.target), str(README), "exec"), {"__name__": "readme"})
        assert shown in capsys.readouterr().out


def test_all_sections_have_examples() -> None:
    assert {heading for heading, _ in examples()} == set(SHOWN)
