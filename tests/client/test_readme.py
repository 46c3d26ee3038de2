"""The examples in the client's README run as they are."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import pytest

from tests.client.fake_admin import FakeAdmin
from tests.client.fake_server import FakeServer, answers, calls, fails, reason, retry_in, violation

README = Path(__file__).resolve().parents[2] / "clients" / "python" / "README.md"


def examples() -> list[tuple[str, str]]:
    """Heading and code of each Python example."""
    pairs: list[tuple[str, str]] = []
    for part in README.read_text().split("\n## ")[1:]:
        heading = part.partition("\n")[0]
        pairs += [(heading, code) for code in re.findall(r"```python\n(.*?)```", part, re.DOTALL)]
    return pairs


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
}


ADMIN = "Tenants and experiments"
OF_REQUESTS = [example for example in examples() if example[0] != ADMIN]


@pytest.mark.parametrize(("heading", "code"), OF_REQUESTS, ids=[heading for heading, _ in OF_REQUESTS])
def test_example(heading: str, code: str, server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    for behaviour, shown in SHOWN[heading]:
        server.script = [behaviour]
        assert "127.0.0.1:50051" in code
        run(code, server.target)
        assert shown in capsys.readouterr().out


def test_example_of_tenants(admin: FakeAdmin, capsys: pytest.CaptureFixture[str]) -> None:
    [code] = [code for heading, code in examples() if heading == ADMIN]
    run(code, admin.target)
    assert capsys.readouterr().out == ("tenants/acme trie 2.0\n")


def run(code: str, target: str) -> None:
    exec(compile(code.replace("127.0.0.1:50051", target), str(README), "exec"), {"__name__": "readme"})


def test_all_sections_have_examples() -> None:
    assert {heading for heading, _ in examples()} == {*SHOWN, ADMIN}
