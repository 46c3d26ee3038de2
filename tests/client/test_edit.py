"""`draftwood tenant edit` and `experiment edit` with a scripted editor."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from pathlib import Path

import pytest
from google.protobuf.json_format import ParseDict

from draftwood.admin.v1 import tenants_pb2 as pb
from tests.client.conftest import Cli
from tests.client.fake_admin import FakeAdmin

Edits = list[list[tuple[str, str]]]

EDITOR = """\
import json, pathlib, sys
script, file = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
edits, texts = json.loads(script.read_text())
text = file.read_text()
texts.append(text)
for old, new in edits[len(texts) - 1]:
    if old == "EXIT":
        sys.exit(int(new))
    assert old in text, (old, text)
    text = text.replace(old, new) if old else new
file.write_text(text)
script.write_text(json.dumps([edits, texts]))
"""


class Editor:
    """An editor that replaces texts, one list of replacements for each time that it is opened."""

    def __init__(self, folder: Path) -> None:
        self._script = folder / "script.json"
        self._program = folder / "editor.py"
        self._program.write_text(EDITOR)

    def script(self, edits: Edits) -> str:
        """The value of $EDITOR."""
        self._script.write_text(json.dumps([edits, []]))
        return shlex.join([sys.executable, str(self._program), str(self._script)])

    @property
    def seen(self) -> list[str]:
        """What it showed, each time."""
        texts: list[str] = json.loads(self._script.read_text())[1]
        return texts


@pytest.fixture
def editor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Editor:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return Editor(tmp_path)


@pytest.fixture(autouse=True)
def acme(admin: FakeAdmin) -> pb.Tenant:
    fields = {"name": "tenants/acme", "etag": "a", "weight": 2, "drafting": {"strategy": "trie", "maxNodes": 4}}
    tenant = admin.tenants.held["tenants/acme"] = ParseDict(fields, pb.Tenant())
    return tenant


def no_files_left(tmp_path: Path) -> bool:
    return not list((tmp_path / "tmp").iterdir())


def test_the_changed_fields_are_saved(admin: FakeAdmin, run_admin: Cli, editor: Editor, tmp_path: Path) -> None:
    value = editor.script(
        [[("weight: 2", "weight: 3"), ("  maxNodes: 4\n", ""), ("strategy: trie", "strategy: hybrid")]]
    )
    result = run_admin("tenant", "edit", "acme", EDITOR=value, VISUAL="")
    assert result.stdout.splitlines() == [
        "  drafting.strategy: trie -> hybrid",
        "  drafting.maxNodes: 4 -> unset",
        "  weight: 2 -> 3",
        "tenant acme changed",
    ]
    tenant = admin.tenants.held["tenants/acme"]
    assert (tenant.weight, tenant.drafting.strategy, tenant.drafting.HasField("max_nodes")) == (3, "hybrid", False)
    [(_, _, mask)] = admin.tenants.writes
    assert mask == ["drafting.strategy", "drafting.max_nodes", "weight"]
    [shown] = editor.seen
    assert shown.startswith("# tenant acme. Lines that begin with # are ignored")
    assert "etag" not in shown
    assert no_files_left(tmp_path)


@pytest.mark.parametrize("edits", [[], [("weight: 2", "weight: 2  # two")], [("", "# nothing\n")]])
def test_nothing_changed(admin: FakeAdmin, run_admin: Cli, editor: Editor, edits: list[tuple[str, str]]) -> None:
    result = run_admin("tenant", "edit", "acme", VISUAL=editor.script([edits]))
    assert (result.stdout, result.exit_code) == ("nothing changed\n", 0)
    assert admin.tenants.writes == []


def test_an_error_opens_the_editor_again(admin: FakeAdmin, run_admin: Cli, editor: Editor, tmp_path: Path) -> None:
    steps: Edits = [
        [("weight: 2", "weight: [")],
        [("weight: [", "wait: 3")],
        [("wait: 3", "weight: 500")],
        [("weight: 500", "weight: 5")],
    ]
    result = run_admin("tenant", "edit", "acme", VISUAL=editor.script(steps))
    assert (result.stderr, result.exit_code) == ("", 0)
    assert admin.tenants.held["tenants/acme"].weight == 5
    first, second, third, fourth = editor.seen
    assert "ERROR" not in first
    assert second.startswith("# ERROR: text: is not valid YAML, line ")
    assert "weight: [" in second
    assert third.startswith("# ERROR: wait: there is no such field; did you mean weight?")
    assert fourth.startswith("# ERROR: tenant.weight: 500 is not allowed; it must lie in [0.01, 100]\n")
    assert fourth.count("ERROR") == 1
    assert fourth.count("Lines that begin") == 1
    assert len(admin.tenants.writes) == 1
    assert no_files_left(tmp_path)


def test_a_conflict_keeps_both_changes(admin: FakeAdmin, run_admin: Cli, editor: Editor, tmp_path: Path) -> None:
    def interfere() -> None:
        other = admin.tenants.held["tenants/acme"]
        other.etag, other.description, other.drafting.max_nodes = "b", "by another", 9

    admin.tenants.before_write = interfere
    value = editor.script([[("weight: 2", "weight: 3")], [("weight: 3", "weight: 4")]])
    result = run_admin("tenant", "edit", "acme", VISUAL=value, stdin="\n")
    assert result.exit_code == 0
    tenant = admin.tenants.held["tenants/acme"]
    assert (tenant.weight, tenant.description, tenant.drafting.max_nodes) == (4, "by another", 9)
    assert admin.tenants.writes == [("update", "tenants/acme", ["weight"])]
    again = editor.seen[1]
    assert again.startswith("# NOTE: changed meanwhile by another: ")
    assert "description: unset -> by another" in result.stderr
    assert "description: by another\n" in again
    assert "weight: 3\n" in again
    assert "maxNodes: 9\n" in again
    assert no_files_left(tmp_path)


def test_without_a_saved_text_nothing_changes(
    admin: FakeAdmin, run_admin: Cli, editor: Editor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run_admin("tenant", "edit", "acme", VISUAL=editor.script([[("weight: 2", "weight: 500")], []]))
    assert result.stderr.startswith("error: tenant: nothing was saved; tenant.weight: 500 is not allowed")
    assert result.exit_code == 2
    result = run_admin("tenant", "edit", "acme", VISUAL=editor.script([[("EXIT", "3")]]))
    assert "ended with status 3; nothing was saved" in result.stderr
    result = run_admin("tenant", "edit", "acme", VISUAL="/no/such/editor")
    assert result.stderr.startswith("error: EDITOR: /no/such/editor: ")
    assert (result.stderr.count("\n"), result.exit_code) == (1, 2)
    result = run_admin("tenant", "edit", "acme", VISUAL="", EDITOR="", PATH="/nowhere")
    assert result.stderr == "error: EDITOR: is not set, and there is neither vi nor nano\n"
    admin.tenants.before_write = lambda: setattr(admin.tenants.held["tenants/acme"], "etag", "b")
    value = editor.script([[("weight: 2", "weight: 3")]])
    assert run_admin("tenant", "edit", "acme", VISUAL=value, stdin="n\n").exit_code == 1

    def interrupted(*args: object, **arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("draftwood_client.cli.admin.editing.subprocess.run", interrupted)
    result = run_admin("tenant", "edit", "acme", VISUAL="any")
    assert (result.output, result.exit_code) == ("", 130)
    assert admin.tenants.writes == []
    assert no_files_left(tmp_path)
