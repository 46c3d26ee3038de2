"""`draftwood key`, the file that it changes, and servers that follow the file."""
# ruff: noqa: ASYNC240  # small files of the test

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from draftwood_client import AsyncClient, PermissionDeniedError, UnauthenticatedError
from draftwood_model_runner.errors import InvalidInputError
from draftwood_service.auth.auth_file import AuthFile, parse, read, updated
from draftwood_service.auth.commands import key
from tests.service.fakes import rewrite, serving, until

HASH = "0" * 64


def run(capsys: pytest.CaptureFixture[str], *args: str, status: int = 0) -> Any:
    """What the command prints, as JSON; its error if the status is not 0."""
    assert key([*args]) == status
    shown = capsys.readouterr()
    return shown.err if status else json.loads(shown.out)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "auth.yaml"


@pytest.fixture
def in_new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as changed:
        changed.setenv("TZ", "America/New_York")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("in_new_york")
def test_create_list_and_revoke(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    flag = ("--file", str(file), "--json")
    made = run(capsys, "create", *flag, "--tenant", "acme", "--expires", "90d", "--note", "billing")
    other = run(capsys, "create", *flag, "--role", "operator")
    assert made["key"].startswith(f"dw_{made['id']}_")
    assert file.stat().st_mode & 0o777 == 0o600
    assert made["key"] not in file.read_text()
    assert made["key"][16:] not in file.read_text()
    [first, second] = run(capsys, "list", *flag)["keys"]
    assert (first["id"], first["tenant"], first["role"], first["note"]) == (made["id"], "acme", "caller", "billing")
    assert (second["tenant"], second["role"], second["expires"], second["note"]) == (None, "operator", None, "")
    assert abs(datetime.fromisoformat(first["created"]) - datetime.now(UTC)) < timedelta(minutes=1)
    assert "sha256" not in first
    days = datetime.fromisoformat(first["expires"]) - datetime.now(UTC)
    assert timedelta(days=89) < days <= timedelta(days=90)

    later = run(capsys, "revoke", *flag, made["id"], "--after", "24h")
    assert not later["revoked"]
    hours = datetime.fromisoformat(later["expires"]) - datetime.now(UTC)
    assert timedelta(hours=23) < hours <= timedelta(hours=24)
    assert run(capsys, "revoke", *flag, made["id"], "--after", "90d")["expires"] == later["expires"]  # never later
    assert run(capsys, "revoke", *flag, other["id"])["revoked"]
    assert [entry.id for entry in read(file).keys] == [made["id"]]
    said = run(capsys, "revoke", *flag, other["id"], status=2)
    assert said == f"error: ID {other['id']}: {file} has no such key\n"


def test_what_people_read(capsys: pytest.CaptureFixture[str], file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key alone goes to stdout, so that scripts can keep it."""
    monkeypatch.setenv("COLUMNS", "120")
    assert key(["create", "--file", str(file), "--tenant", "acme", "--note", "billing"]) == 0
    shown = capsys.readouterr()
    assert shown.out.strip().startswith("dw_")
    assert len(shown.out.split()) == 1
    assert "caller of tenant acme. Keep it safe" in shown.err
    [entry] = read(file).keys
    with updated(file) as entries:
        entries.append(entry.model_copy(update={"id": "b" * 12, "expires": datetime(2026, 1, 4, tzinfo=UTC)}))
    assert key(["list", "--file", str(file)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.replace("│", " ").splitlines()]
    day = f"{entry.created:%Y-%m-%d}"
    assert [entry.id, "acme", "caller", day, "billing"] in rows
    assert ["b" * 12, "acme", "caller", day, "expired", "billing"] in rows
    assert key(["revoke", "--file", str(file), entry.id, "--after", "24h"]) == 0
    assert f"key {entry.id}: caller of tenant acme, until 20" in capsys.readouterr().out
    assert key(["revoke", "--file", str(file), entry.id]) == 0
    assert capsys.readouterr().out == f"key {entry.id} is revoked\n"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["create"], "tenant: must be set for the role caller"),
        (["create", "--tenant", "a\n"], "tenant 'a\\n': must be 1 to 128 letters"),
        (["create", "--tenant", "a", "--role", "admin"], "role admin: must be one of caller, tenant-admin, operator"),
        (["create", "--tenant", "a", "--expires", "soon"], "expires soon: must look like 90d, 12h or 30m"),
        (["list"], "auth_file {file}: cannot be read: No such file or directory"),
    ],
)
def test_refused(capsys: pytest.CaptureFixture[str], file: Path, arguments: list[str], problem: str) -> None:
    error = run(capsys, *arguments, "--file", str(file), status=2)
    assert error.startswith("error: ")
    assert problem.format(file=file) in error
    assert error.count("\n") == 1
    assert not file.exists()


KEY = f"{{id: aaaaaaaaaaaa, tenant: a, sha256: '{HASH}', created: 2026-01-01}}"
BAD = {
    "keys: [": "not valid YAML: while parsing a flow node expected the node content",
    "- a": "",
    "kees: []": "kees: there is no such field",
    f"keys: [{KEY}, {KEY}]": "auth_file: key:aaaaaaaaaaaa occurs twice",
    "keys: [{id: x}]": "keys[0].id: is not what `draftwood key create` writes",
    "keys: [{id: aaaaaaaaaaaa}]": "keys[0].sha256: is missing",
    f"keys: [{{id: aaaaaaaaaaaa, sha256: '{HASH}', created: 2026-01-01}}]": "must be set for the role caller",
    f"keys: [{KEY[:-1]}, exires: 2026-02-01}}]": "keys[0].exires: there is no such field",
    "certificates: [{tenant: a}]": "certificates[0]: must have either name",
    "certificates: [{name: x, role: root}]": "certificates[0].role: must be one of caller, tenant-admin, operator",
    "keys: [{created: 2026-13-45}]": "not valid YAML",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_file_is_refused_with_the_place(text: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        parse(text.encode())
    assert error.value.field == "auth_file"
    assert BAD[text] in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_written_is_refused(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    file.with_name("auth.yaml.part").mkdir()
    for path in (file, file.parent / "missing" / "auth.yaml"):
        said = run(capsys, "create", "--file", str(path), "--tenant", "acme", status=2)
        assert f"error: auth_file {path}: cannot be written: " in said
        assert not path.exists()


def test_a_change_keeps_the_mode_of_the_file_and_what_it_does_not_change(file: Path) -> None:
    text = f"keys:\n- {KEY[:-1]}, role: caller, note: Müller}}\ncertificates:\n- {{common_name: x, tenant: a}}\n"
    file.write_text(text)
    file.with_name("auth.yaml.part").write_text("of a process that was killed")
    file.chmod(0o644)
    with updated(file):
        pass
    assert file.stat().st_mode & 0o777 == 0o644
    assert parse(file.read_bytes()) == parse(text.encode())
    assert "Müller" in file.read_text()
    assert "null" not in file.read_text()
    assert [one.name for one in file.parent.iterdir()] == ["auth.yaml"]


def test_one_process_at_a_time_changes_a_file(file: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        made = [*threads.map(lambda _: key(["create", "--file", str(file), "--tenant", "a"]), range(24))]
    assert made == [0] * 24
    assert len(read(file).keys) == 24


@pytest.mark.usefixtures("in_new_york")
def test_an_empty_file_and_times_with_and_without_a_zone(file: Path) -> None:
    assert parse(b"") == AuthFile()
    for created in ("2026-01-01", "2026-01-01 00:00:00", "2026-01-01T02:00:00+02:00"):
        file.write_text(f"keys: [{KEY.replace('2026-01-01', created)}]")
        with updated(file) as entries:
            assert entries[0].created == datetime(2026, 1, 1, tzinfo=UTC)
            assert HASH not in repr(entries)
        assert "created: '2026-01-01T00:00:00Z'" in file.read_text()


async def changed(path: Path, text: str, client: AsyncClient, works: bool) -> None:
    """Writes the file and waits until the server has seen it."""
    rewrite(path, text)
    now = not works
    async with asyncio.timeout(20):
        while now is not works:
            await asyncio.sleep(0.05)
            try:
                await client.model_info()
                now = True
            except UnauthenticatedError:
                now = False


async def test_a_server_follows_the_file(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, file: Path
) -> None:
    flag = ("--file", str(file), "--json", "--tenant", "acme")
    old, new = (run(capsys, "create", *flag)["key"] for _ in range(2))
    both = file.read_text()
    run(capsys, "revoke", "--file", str(file), "--json", old[3:15])
    async with (
        serving(auth_file=file) as served,
        AsyncClient(served.server.address, api_key=old) as with_old,
        AsyncClient(served.server.address, api_key=new, tenant="acme") as with_new,
    ):
        with pytest.raises(UnauthenticatedError, match="the call has no valid credential"):
            await with_old.model_info()
        assert (await with_new.generate("x", max_tokens=2)).text
        with pytest.raises(PermissionDeniedError, match="another tenant"):
            await with_new.generate("x", max_tokens=2, tenant="beta")
        await changed(file, both, with_old, works=True)
        rewrite(file, "keys: [nonsense")  # the version before stays in use
        await until(lambda: "the version before stays in use" in caplog.text)
        await with_old.model_info()
        await changed(file, "keys: []", with_old, works=False)
        with pytest.raises(UnauthenticatedError):
            await with_new.model_info()
