"""Settings that the server and plug-ins of engines have in common."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from draftwood_memory.errors import InvalidSettingError
from draftwood_memory.settings.memory_settings import MemorySettings, read_environment
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
            one.name: getattr(server, one.name) for one in fields(MemorySettings)
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
        ("STORE_TIMEOUT", "0", "store_timeout 0.0: must be greater than 0"),
        ("MAX_DRAFT_NODES", "2000", "max_draft_nodes 2000: must be at most 1024"),
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
    code = "import sys, draftwood_memory.settings.memory_settings as _; print({'numba', 'redis'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "set()\n"
