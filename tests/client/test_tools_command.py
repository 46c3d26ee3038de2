"""`draftwood chat --tools`: functions from JSON, calls as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from draftwood.v1 import generation_pb2 as pb
from draftwood_client.cli import build_app
from tests.client.fake_server import FakeServer, calls

WEATHER = {"name": "weather", "description": "Of a city", "parameters": {"type": "object"}}
CALL = ("weather", ['{"city": ', '"Köln"}'])
LINE = '{"name": "weather", "arguments": {"city": "Köln"}}\n'


@pytest.fixture
def ask(server: FakeServer) -> Callable[..., Result]:
    server.tool_format = pb.ToolFormat(
        begin="<tool_call>\n", end="\n</tool_call>", between="\n", name_key="name", arguments_key="arguments"
    )

    def run(tools: str, *flags: str) -> Result:
        arguments = ["chat", "Is it cold?", "--target", server.target, "--tools", tools, *flags]
        return CliRunner().invoke(build_app(), arguments, catch_exceptions=False)

    return run


@pytest.mark.parametrize("tools", [[WEATHER], [{"type": "function", "function": WEATHER}], [{"name": "weather"}]])
def test_tools_go_to_the_server(ask: Callable[..., Result], server: FakeServer, tools: list[object]) -> None:
    assert ask(json.dumps(tools)).exit_code == 0
    tool = server.requests[0].chat.tools[0]
    assert tool.name == "weather"
    assert (tool.description, tool.parameters) in [("Of a city", '{"type": "object"}'), ("", "")]


def test_calls_are_lines(ask: Callable[..., Result], server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text(json.dumps([WEATHER]))
    server.script = [calls("Hm", "I will see.", CALL, CALL)]
    assert ask(f"@{tmp_path / 'tools.json'}").stdout == f"I will see.\n{LINE}{LINE}"  # reasoning is for terminals
    server.script = [calls("", "", ("weather", ['{"city":\n', '"Köln"']))]
    assert ask(json.dumps([WEATHER])).stdout == '{"name": "weather", "arguments": {"city": "Köln"}\n'  # cut off


def test_calls_as_json(ask: Callable[..., Result], server: FakeServer) -> None:
    server.script = [calls("Hm", "See:", CALL)]
    value = json.loads(ask(json.dumps([WEATHER]), "--json").stdout)
    assert (value["text"], value["reasoning"], value["finish_reason"]) == ("See:", "Hm", "tool_calls")
    assert value["tool_calls"] == [{"name": "weather", "arguments": '{"city": "Köln"}', "id": "c0"}]


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        ("[", "--tools: is not JSON: Expecting value"),
        ("[" * 100_000, "--tools: is not JSON"),
        ("[]", "--tools: must be a JSON list of functions"),
        ('[{"name": "a"}, {"type": "function"}]', "--tools: entry 1: must be an object with a name, a description"),
        ('[{"name": "a", "strict": true}]', "--tools: entry 0: has the key 'strict'; allowed are description, name"),
        ('[{"name": "a", "description": 3}]', "--tools: entry 0: must have a text as its description"),
    ],
)
def test_bad_tools(ask: Callable[..., Result], tools: str, problem: str) -> None:
    result = ask(tools)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {problem}")


def test_what_does_not_go_with_tools(ask: Callable[..., Result], server: FakeServer) -> None:
    refused = ask('[{"name": "a"}]', "--show-drafts")
    assert refused.stderr == "error: --show-drafts: cannot be used with --tools\n"
    server.tool_format = None
    refused = ask('[{"name": "a"}]')
    assert (refused.exit_code, refused.stderr) == (2, "error: --tools: fake takes none: the template shows no tools\n")
