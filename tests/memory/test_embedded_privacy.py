"""The embedded store's folder and process keep memories and keys to this user."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from draftwood_memory.errors import InvalidSettingError
from draftwood_memory.store.embedded import EmbeddedServer, binary


def mode(folder: Path) -> int:
    return stat.S_IMODE(folder.stat().st_mode)


def test_its_folder_is_private_whether_or_not_it_was_there(tmp_path: Path) -> None:
    EmbeddedServer(tmp_path / "a" / "store", 1 << 23)
    assert mode(tmp_path / "a" / "store") == 0o700
    folder = tmp_path / "store"
    folder.mkdir()
    folder.chmod(0o755)
    (folder / "appendonlydir").mkdir()
    EmbeddedServer(folder, 1 << 23)
    assert mode(folder) == 0o700


def test_a_folder_with_other_files_is_refused_rather_than_closed(tmp_path: Path) -> None:
    folder = tmp_path / "home"
    folder.mkdir()
    folder.chmod(0o755)
    (folder / "letters").write_text("x")
    with pytest.raises(InvalidSettingError, match=r"letters.*folder of its own"):
        EmbeddedServer(folder, 1 << 23)
    assert mode(folder) == 0o755


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(InvalidSettingError, match="another user"):
        EmbeddedServer(tmp_path, 1 << 23)


def test_the_server_does_not_inherit_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWOOD_STORE_KEYS", "names=secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    program, seen = tmp_path / "program", tmp_path / "environment"  # the server overwrites its own with its title
    program.write_text(f'#!/bin/sh\nenv > {seen}\nexec {binary()} "$@"\n')
    program.chmod(0o700)
    monkeypatch.setattr("draftwood_memory.store.embedded.binary", lambda: program)
    with EmbeddedServer(tmp_path / "store", 1 << 23) as server:
        server.wait()
    assert "PATH=" in seen.read_text()
    assert "secret" not in seen.read_text()
