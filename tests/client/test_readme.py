"""The examples in the client's README run as they are."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import pytest

from tests.client.fake_admin import FakeAdmin
from tests.client.fake_server import FakeServer, answers, calls, fails, reason, retry_in, violation

README = Path(__file__).resolve().parents[2] / "clients" / "python" / "README.md"


EXAMPLES = [
    (part.partition("\n")[0], code)
    for part in README.read_text().split("\n## ")[1:]
    for code in re.findall(r"```python\n(.*?)```", part, re.DOTALL)
]
"""Heading and code of each."""
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
    "Tools and reasoning": [(calls("Hm", "", ("track", ['{"order"', ": 7}"])), 'track {"order": 7}\n')],
    "Retries and several servers": [(answers("It is", " here."), "\n")],
    "Tenants and experiments": [(answers(), "tenants/acme trie 2.0\n")],
}


@pytest.mark.parametrize(("heading", "code"), EXAMPLES, ids=[heading for heading, _ in EXAMPLES])
def test_example(
    heading: str, code: str, server: FakeServer, admin: FakeAdmin, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "127.0.0.1:50051" in code
    for behaviour, shown in SHOWN[heading]:
        server.script = [behaviour]
        target = admin.target if heading == "Tenants and experiments" else server.target
        exec(compile(code.replace("127.0.0.1:50051", target), str(README), "exec"), {"__name__": "readme"})
        assert shown in capsys.readouterr().out


def test_all_sections_have_examples() -> None:
    assert {heading for heading, _ in EXAMPLES} == SHOWN.keys()
