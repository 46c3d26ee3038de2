"""The `draftwood` command: exact text to pipes, one line for an error, exit statuses, commands of other packages."""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import Distribution, EntryPoint, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from draftwood.v1 import generation_pb2 as pb
from draftwood_client.cli import plugins
from draftwood_client.cli.chat import HELP
from tests.client.conftest import Cli
from tests.client.fake_server import WAIT_SECONDS, FakeServer, answers, calls, fails, hangs, reason, violation
from tests.client.terminal import Terminal


def contents(request: pb.GenerateRequest) -> list[str]:
    """The text of each message of a chat."""
    return ["".join(part.text for part in turn.content) for turn in request.chat.messages]


def test_the_api_key_comes_from_a_flag_or_the_environment(cli: Cli, server: FakeServer) -> None:
    cli("complete", "x", "--api-key", "one")
    cli("complete", "x", DRAFTWOOD_API_KEY="two")
    assert [headers["authorization"] for headers in server.metadata] == ["Bearer one", "Bearer two"]
    refused = cli("chat", "x", "--target", "example.org:1", DRAFTWOOD_API_KEY="hush")
    assert refused.stderr.startswith("error: --api-key: would be sent to example.org:1 in clear text; use TLS")
    assert (refused.exit_code, "hush" in refused.output) == (2, False)


@pytest.mark.parametrize("arguments", [["complete"], ["complete", "-"], ["chat", "-"]])
def test_the_prompt_may_come_on_stdin(cli: Cli, server: FakeServer, arguments: list[str]) -> None:
    assert cli(*arguments, stdin="zwei\nZeilen ä\n\n").exit_code == 0
    [request] = server.requests
    [asked] = [request.text] if request.text else contents(request)
    assert asked == "zwei\nZeilen ä\n"


def test_flags_reach_the_request(cli: Cli, server: FakeServer) -> None:
    cli("chat", "Why?", "--system", "Be brief.", "--tenant", "acme", "--session", "chat-7")
    flags = "--temperature 0.5 --seed 7 -n 9 --stop a --stop b --stop-token-id 3 --ignore-eos --no-drafting"
    cli("complete", "x", *flags.split(), "--max-draft-nodes", "0", "--strategy", "trie")
    chat, request = server.requests
    assert (contents(chat), chat.tenant, chat.session) == (["Be brief.", "Why?"], "acme", "chat-7")
    assert [turn.role for turn in chat.chat.messages] == ["system", "user"]
    assert request.text == "x"
    assert (request.sampling.temperature, request.sampling.seed, request.stop.max_tokens) == (0.5, 7, 9)
    assert [*request.stop.strings, *request.stop.token_ids] == ["a", "b", 3]
    assert request.stop.ignore_eos
    assert request.drafting.HasField("max_nodes")
    assert (request.drafting.enabled, request.drafting.strategy, request.drafting.max_nodes) == (False, "trie", 0)
    assert not request.sampling.HasField("top_k")


def test_text_to_a_pipe_is_exact_and_drafted_tokens_are_coloured(cli: Cli, server: FakeServer) -> None:
    server.script = [answers("Hé\r\n", "\x1b[31m\t", "ö")]
    result = cli("chat", "Why?", "--show-drafts", NO_COLOR="")
    assert result.stdout_bytes == "Hé\r\n\x1b[31m\tö".encode()
    assert (result.stderr, result.exit_code) == ("", 0)
    server.script = [answers("a", "b", "c", drafted=[False, True, False])]
    assert cli("chat", "x", "--show-drafts", NO_COLOR="", FORCE_COLOR="1").stdout == "a\x1b[32mb\x1b[0mc"
    assert cli("chat", "x", "--show-drafts", FORCE_COLOR="1").stdout == "abc"
    assert cli("chat", "x", NO_COLOR="", FORCE_COLOR="1").stdout == "abc"


def test_json_is_one_object_and_statistics_go_to_stderr(cli: Cli, server: FakeServer) -> None:
    result = cli("chat", "x", "--json", "--show-drafts")
    value = json.loads(result.stdout)
    assert (result.stdout.count("\n"), value["text"]) == (1, "Hello, wörld!")
    assert (value["finish_reason"], value["matched_stop"]) == ("stop", None)
    assert value["timings"] == {"queue": 0.25, "prefill": 0.5, "decode": 1.25}
    assert value["drafting"]["by_source"] == {"trie": {"draft_tokens": 8, "accepted_tokens": 2}}
    assert value["details"][1] == {"token_id": 0, "text": ", wörld", "bytes": [], "special": False, "drafted": True}
    result = cli("chat", "x", "--stats")
    assert result.stdout == "Hello, wörld!"
    assert result.stderr == (
        "3 tokens in 4 steps, 1.50 per step; trie: 2 of 8 draft tokens accepted (25%);"
        " first token after 0.750 s; then 1.6 tokens/s\n"
    )
    server.arm = ("trie-vs-hybrid", "hybrid")
    shown = cli("chat", "x", "--stats").stderr
    assert "; trie (arm hybrid of trie-vs-hybrid): 2 of 8 draft tokens accepted (25%);" in shown
    value = json.loads(cli("chat", "x", "--json").stdout)
    assert (value["experiment"], value["arm"], "details" in value) == ("trie-vs-hybrid", "hybrid", False)


def test_errors_are_one_line_and_status_1(cli: Cli, server: FakeServer, nobody: str) -> None:
    detail = violation("sampling.temperature", "must lie\nin [0, 100]")
    server.script = [fails(grpc.StatusCode.INVALID_ARGUMENT, "bad request", reason("INVALID_VALUE"), detail)]
    result = cli("chat", "x", "--temperature", "-1")
    assert result.stderr == "error: bad request; sampling.temperature: must lie in [0, 100]\n"
    assert (result.stdout, result.exit_code) == ("", 1)
    result = cli("info", "--target", nobody)
    assert result.stderr.startswith(f"error: cannot connect to {nobody}: nothing listens there")
    assert (result.stderr.count("\n"), result.exit_code) == (1, 1)
    server.script = [fails(grpc.StatusCode.UNAUTHENTICATED, "no valid credential", reason("UNAUTHENTICATED"))]
    result = cli("chat", "x")
    given = "a key is given by --api-key or DRAFTWOOD_API_KEY, a token by --token or DRAFTWOOD_TOKEN"
    assert result.stderr == f"error: no valid credential; {given}\n"
    server.script = [hangs("begun")]
    result = cli("chat", "x", "--timeout", "0.9")
    assert (result.stdout, result.stderr) == ("begun", f"error: {server.target}: no complete answer within 0.9 s\n")
    server.script = [fails(grpc.StatusCode.INTERNAL, "broken", reason("MODEL_FAILED"))]
    before = len(server.requests)
    result = cli("chat", stdin="first\nsecond\n")
    assert (result.stderr, result.exit_code, len(server.requests) - before) == ("error: broken\n", 1, 1)
    server.has_chat_template = False
    assert cli("chat", stdin="x\n").stderr == "error: chat: fake has no chat template; try `draftwood complete`\n"


def test_a_schema_or_grammar_may_come_from_a_file(cli: Cli, server: FakeServer, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "order.json", tmp_path / "order.lark"
    schema.write_text('{"type": "object"}')
    grammar.write_text('start: "ö"')
    cli("chat", "x", "--json-schema", f"@{schema}")
    cli("chat", "x", "--lark", f"@{grammar}")
    assert [request.format.json_schema or request.format.lark for request in server.requests] == [
        '{"type": "object"}',
        'start: "ö"',
    ]
    grammar.write_bytes(b"\xff")
    refused = cli("chat", "x", "--lark", f"@{grammar}")
    assert (refused.exit_code, "cannot be read: it is not UTF-8 text" in refused.stderr) == (2, True)
    refused = cli("chat", "x", "--json-schema", "@none.json")
    assert refused.stderr == "error: --json-schema: 'none.json' cannot be read: No such file or directory\n"


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (["chat", "x", "--timeout", "-1"], None, "error: --timeout: -1.0 is not allowed"),
        (["chat", "x", "--temperature", "nan"], None, "error: --temperature: nan is not allowed"),
        (["chat", "a\udcff"], None, "error: messages[0].content: character 1 is the unpaired surrogate"),
        (["complete"], b"\xff", "error: TEXT: byte 0 of stdin is not UTF-8"),
        (["chat", "--json"], None, "error: --json: needs a question: draftwood chat"),
        (["chat", "x", "--tls-ca", "/no/such"], None, "error: --tls-ca: cannot read '/no/such'"),
        (["chat", "x", "--tls-cert", "c"], None, "error: --tls-key: must be set, since --tls-cert is set\n"),
        (["chat", "x", "--target", "host"], None, "error: --target: 'host' has no valid port"),
        (["chat", "x", "--tenant", ""], None, "error: --tenant: must not be empty; leave it out for"),
        (["memory", "purge", "--yes", "--tenant", ""], None, "error: --tenant: must not be empty; leave it out for"),
        (["chat", ""], None, "error: QUESTION: is empty\n"),
        (["complete"], b"\n", "error: TEXT: is empty\n"),
        (["detokenize", "1", "x"], None, "error: IDS: 'x' is not a token id"),
        (["chat", "x", "--no-such-option"], None, "No such option"),
    ],
)
def test_wrong_usage_is_status_2(cli: Cli, arguments: list[str], stdin: bytes | None, message: str) -> None:
    result = cli(*arguments, stdin=stdin)
    assert message in result.stderr
    assert (result.stdout, result.exit_code) == ("", 2)


def test_info_tokenize_detokenize(cli: Cli) -> None:
    shown = cli("info").stdout
    assert "parameters            6,000,000\n" in shown
    assert "strategies            none, trie\n" in shown
    drafting = "strategy head, name h, parameters 2,000,000; strategy draft_model, name org/m, parameters 3"
    assert f"draft models          {drafting}\n" in shown
    assert "generation defaults   temperature 0.0, top k 0," in shown
    assert not any(sign in shown for sign in ("{", "None", "True"))
    assert json.loads(cli("info", "--json").stdout)["strategies"] == ["none", "trie"]
    assert cli("tokenize", "äb").stdout == "228 98\n"
    assert cli("tokenize", "--tokens", "-", stdin="äb\n").stdout == "228\t'ä'\n98\t'b'\n"
    assert json.loads(cli("tokenize", "--json", "b").stdout) == {"token_ids": [98], "tokens": ["b"]}
    assert cli("tokenize", "--chat", "b").stdout == cli("tokenize", "<user>b").stdout
    assert cli("detokenize", "228", "98").stdout == "äb"
    assert cli("detokenize", stdin="[228, 98]\n").stdout == "äb"


def test_version_and_help(cli: Cli) -> None:
    assert cli("--version").stdout == f"draftwood {version('draftwood-client')}\n"
    shown = cli("--help").stdout
    assert all(name in shown for name in ("complete", "chat", "info", "tokenize", "detokenize"))
    assert "DRAFTWOOD_TARGET" in cli("chat", "--help").stdout


def test_chat_from_a_pipe_keeps_the_conversation(cli: Cli, server: FakeServer) -> None:
    server.script = [answers("one"), answers("two\n"), answers("three")]
    result = cli("chat", "--system", "S", stdin="first\n\nsecond\n/reset\nthird\n/exit\nfourth\n")
    assert result.stdout == "one\ntwo\n\nthree\n"
    assert [*map(contents, server.requests)] == [["S", "first"], ["S", "first", "one", "second"], ["S", "third"]]


def test_a_conversation_at_the_terminal(server: FakeServer) -> None:
    """It has commands and shows reasoning; Ctrl-C stops an answer, and not the chat."""
    server.script = [calls("Hm.", "Yes."), answers("two"), hangs("an unfinished"), answers("four")]
    with Terminal("chat", target=server.target) as terminal:
        assert HELP in terminal.wait_for("> ")
        terminal.type("first\n")
        assert re.search(r"Hm\.\S*\r\n\r\nYes\.\r\n", terminal.wait_for("> "))
        for line, answer in (("second", "two\r\n"), ("/help", HELP), ("/nonsense", "is not a command"), ("/reset", "")):
            terminal.type(f"{line}\n")
            assert answer in terminal.wait_for("> "), line
        terminal.type("third\n")
        terminal.wait_for("an unfinished")
        terminal.interrupt()
        terminal.wait_for("stopped")
        assert server.cancelled.wait(WAIT_SECONDS)
        terminal.wait_for("> ")
        terminal.interrupt_until("> ")
        terminal.type("fourth\n")
        terminal.wait_for("four\r\n")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.end() == 0
    asked = [*map(contents, server.requests)]
    assert asked == [["first"], ["first", "Yes.", "second"], ["third"], ["third", "an unfinished", "fourth"]]
    assert server.requests[1].chat.messages[1].reasoning == "Hm."


def test_ctrl_c_ends_an_answer_with_130(server: FakeServer) -> None:
    """It has colours, and no control characters of the model."""
    server.script = [hangs("a", "\x1b]0;title\x07", "ö")]
    with Terminal("chat", "x", "--show-drafts", target=server.target) as terminal:
        terminal.wait_for("a\x1b[32m\\x1b]0;title\\x07\x1b[0m\x1b[32mö\x1b[0m")
        terminal.interrupt()
        terminal.wait_for("\r\n")
        assert terminal.end() == 130
        assert server.cancelled.wait(WAIT_SECONDS)
        terminal.read_rest()
        assert "Traceback" not in terminal.shown


def plugin(name: str, value: str, distribution: str = "draftwood") -> EntryPoint:
    entry_point = EntryPoint(name, value, plugins.GROUP)
    named: Any = SimpleNamespace(name=distribution)
    dist: Distribution = named
    return entry_point._for(dist)  # type: ignore[attr-defined, no-any-return]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[EntryPoint]:
    """Installs entry points for `draftwood`, with the module that they refer to."""
    (tmp_path / "some_commands.py").write_text(
        "import os\n"
        "from pathlib import Path\n"
        "Path(os.environ['IMPORTED']).touch()\n"
        "def echo(args):\n    print(args)\n    return len(args)\n"
        "def fine(args):\n    pass\n"
    )
    (tmp_path / "needy_commands.py").write_text("import a_module_that_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("IMPORTED", str(tmp_path / "imported"))
    monkeypatch.delitem(sys.modules, "some_commands", raising=False)
    installed_points = [
        plugin("serve", "some_commands:echo"),
        plugin("fine", "some_commands:fine", "other-package"),
        plugin("needy", "needy_commands:run"),
        plugin("broken", "some_commands:missing", "other-package"),
    ]
    monkeypatch.setattr(plugins, "entry_points", lambda group: installed_points)
    return installed_points


@pytest.mark.usefixtures("installed")
def test_commands_of_other_packages_are_imported_when_they_run(cli: Cli, tmp_path: Path) -> None:
    shown = cli("--help").stdout
    assert plugins.KNOWN["serve"].help in shown
    assert "From the package other-package." in shown
    assert not (tmp_path / "imported").exists()
    arguments = ["--help", "-xvz", "--", "--port=1", "word", "--", "-"]
    result = cli("serve", *arguments)
    assert (result.stdout, result.exit_code) == (f"{arguments}\n", len(arguments))
    assert (tmp_path / "imported").exists()
    assert cli("fine").exit_code == 0
    result = cli("needy", "--help")
    assert result.stderr == (
        "error: `draftwood needy` (needy_commands:run) cannot be imported: No module named"
        " 'a_module_that_nobody_has'; the installation of draftwood lacks it\n"
    )
    assert result.exit_code == 1
    result = cli("broken")
    assert result.stderr.startswith("error: `draftwood broken` (some_commands:missing) cannot be imported:")
    assert (result.stderr.count("\n"), result.exit_code) == (1, 1)


def test_without_the_server_its_commands_say_what_to_install(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "entry_points", lambda group: [])
    for command, known in plugins.KNOWN.items():
        words = command.split(".")
        result = cli(*words, "--help")
        assert result.stderr.startswith(f"error: `draftwood {' '.join(words)}` needs pip install {known.install}, or")
        assert (result.stderr.count("\n"), result.exit_code) == (1, 1)
    assert "Serve a model." not in cli("--help").stdout


def test_a_command_can_join_a_group_of_the_client_and_replace_none(cli: Cli, installed: list[EntryPoint]) -> None:
    installed.append(plugin("experiment.replay", "some_commands:echo"))
    for name in ("chat", "experiment", "experiment.report", "experiment.mine", "memory"):
        installed.append(plugin(name, "some_commands:echo", "other-package"))
    shown = cli("experiment", "--help").stdout
    assert all(name in shown for name in ("create", "report", "replay", "mine", "From the package other-package."))
    assert cli("experiment", "replay", "a", "--arm", "x=y").stdout == "['a', '--arm', 'x=y']\n"
    assert "replay" not in cli("--help").stdout
    assert cli("chat", "x").stdout == "Hello, wörld!"
    assert "until Ctrl-C" in cli("experiment", "report", "--help").stdout
    assert "purge" in cli("memory", "--help").stdout


def test_a_package_of_the_same_name_is_told_by_its_place(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = tmp_path / "service_of_others"
    place.mkdir()
    (place / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [plugin("serve", f"{place.name}.commands:serve")])
    for module in (place.name, f"{place.name}.commands"):
        monkeypatch.setitem(sys.modules, module, None)  # so that they are forgotten at the end
        del sys.modules[module]
    for has_module in (False, True):
        if has_module:
            (place / "commands.py").touch()
        result = cli("serve")
        assert f"the package 'service_of_others' that Python finds is {place}, which is not the one" in result.stderr
        assert (result.stderr.count("\n"), result.exit_code, "install" in result.stderr) == (1, 1, False)
