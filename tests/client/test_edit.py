"""`draftwood tenant edit` and `experiment edit` with a scripted editor."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict

from draftwood.admin.v1 import tenants_pb2 as pb
from tests.client.conftest import Cli
from tests.client.fake_admin import FakeAdmin

RUN = "draftwood_client.cli.admin.editing.subprocess.run"
EDIT = ("tenant", "edit", "acme")


class Editor:
    """Replaces texts, by a mapping for each time that it is opened. `seen` are those that it showed."""

    def __init__(self) -> None:
        self.edits: list[dict[str, str]] = []
        self.seen: list[str] = []

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        text = Path(command[-1]).read_text()
        self.seen.append(text)
        for old, new in self.edits.pop(0).items():
            assert old in text, (old, text)
            text = text.replace(old, new) if old else new
        Path(command[-1]).write_text(text)
        return subprocess.CompletedProcess(command, 0)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No file is left at the end."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert not [*tmp_path.iterdir()]


@pytest.fixture
def editor(monkeypatch: pytest.MonkeyPatch) -> Editor:
    made = Editor()
    monkeypatch.setattr(RUN, made.run)
    monkeypatch.setenv("VISUAL", "any")
    return made


@pytest.fixture(autouse=True)
def acme(admin: FakeAdmin) -> pb.Tenant:
    fields = {"name": "tenants/acme", "etag": "a", "weight": 2, "drafting": {"strategy": "trie", "maxNodes": 4}}
    tenant = admin.tenants.held["tenants/acme"] = ParseDict(fields, pb.Tenant())
    return tenant


def test_the_changed_fields_are_saved(admin: FakeAdmin, run_admin: Cli) -> None:
    script = "s/weight: 2/weight: 3/; /maxNodes/d; s/strategy: trie/strategy: hybrid/"
    result = run_admin(*EDIT, EDITOR=f"sed -i '{script}'", VISUAL="")
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


@pytest.mark.parametrize("edits", [{}, {"weight: 2": "weight: 2  # two"}, {"": "# nothing\n"}])
def test_nothing_changed(admin: FakeAdmin, run_admin: Cli, editor: Editor, edits: dict[str, str]) -> None:
    editor.edits = [edits]
    result = run_admin(*EDIT)
    assert (result.stdout, result.exit_code) == ("nothing changed\n", 0)
    assert admin.tenants.writes == []
    [shown] = editor.seen
    assert shown.startswith("# tenant acme. Lines that begin with # are ignored")
    assert "etag" not in shown


def test_an_error_opens_the_editor_again(admin: FakeAdmin, run_admin: Cli, editor: Editor) -> None:
    texts = ["weight: 2", "weight: [", "wait: 3", "weight: 500", "weight: 5"]
    editor.edits = [{old: new} for old, new in pairwise(texts)]
    result = run_admin(*EDIT)
    assert (result.stderr, result.exit_code) == ("", 0)
    assert admin.tenants.held["tenants/acme"].weight == 5
    first, second, third, fourth = editor.seen
    assert "ERROR" not in first
    assert second.startswith("# ERROR: text: is not valid YAML, line ")
    assert "weight: [" in second
    assert third.startswith("# ERROR: wait: there is no such field; did you mean weight?")
    assert fourth.startswith("# ERROR: tenant.weight: 500 is not allowed; it must lie in [0.01, 100]\n")
    assert (fourth.count("ERROR"), fourth.count("Lines that begin")) == (1, 1)
    assert len(admin.tenants.writes) == 1


def test_a_conflict_keeps_both_changes(admin: FakeAdmin, run_admin: Cli, editor: Editor) -> None:
    def interfere() -> None:
        other = admin.tenants.held["tenants/acme"]
        other.etag, other.description, other.drafting.max_nodes = "b", "by another", 9

    admin.tenants.before_write = interfere
    editor.edits = [{"weight: 2": "weight: 3"}, {}]
    result = run_admin(*EDIT, stdin="\n")
    assert result.exit_code == 0
    tenant = admin.tenants.held["tenants/acme"]
    assert (tenant.weight, tenant.description, tenant.drafting.max_nodes) == (3, "by another", 9)
    assert admin.tenants.writes == [("update", "tenants/acme", ["weight"])]
    again = editor.seen[1]
    assert again.startswith("# NOTE: changed meanwhile by another: ")
    assert "description: unset -> by another" in result.stderr
    for line in ("description: by another\n", "weight: 3\n", "maxNodes: 9\n"):
        assert line in again


def test_without_a_saved_text_nothing_changes(
    admin: FakeAdmin, run_admin: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for editor, problem in (
        ("/no/such/editor", "error: EDITOR: /no/such/editor: "),
        ("false", "error: EDITOR: false ended with status 1; nothing was saved\n"),
        ("sed -i 's/weight: 2/weight: 500/'", "error: tenant: nothing was saved; tenant.weight: 500 is not allowed"),
    ):
        result = run_admin(*EDIT, VISUAL=editor)
        assert result.stderr.startswith(problem)
        assert (result.stderr.count("\n"), result.exit_code) == (1, 2)
    result = run_admin(*EDIT, VISUAL="", EDITOR="", PATH="/nowhere")
    assert result.stderr == "error: EDITOR: is not set, and there is neither vi nor nano\n"
    admin.tenants.before_write = lambda: setattr(admin.tenants.held["tenants/acme"], "etag", "b")
    assert run_admin(*EDIT, VISUAL="sed -i 's/weight: 2/weight: 3/'", stdin="n\n").exit_code == 1

    def interrupted(*args: object, **arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RUN, interrupted)
    result = run_admin(*EDIT, VISUAL="any")
    assert (result.output, result.exit_code) == ("", 130)
    assert admin.tenants.writes == []
