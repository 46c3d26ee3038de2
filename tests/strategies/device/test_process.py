"""What a process drafts with while it has an arena."""

from __future__ import annotations

import logging

import pytest

from draftwood_strategies import create
from draftwood_strategies.device import trie as device_trie
from draftwood_strategies.device.arena import DeviceSizes
from draftwood_strategies.device.strategy import DeviceStrategy, drafts_on_device
from draftwood_strategies.mixing.hybrid import HybridStrategy
from draftwood_strategies.trie.strategy import TrieStrategy

SIZES = DeviceSizes(rows=2, row_tokens=64, tenants=2, tenant_tokens=1024, contexts=1024)


def test_tries_with_the_arena_s_options_are_on_the_device_while_there_is_one() -> None:
    with drafts_on_device(SIZES, "cpu") as device:
        found = create("trie", capacity_tokens=2000)
        assert isinstance(found, DeviceStrategy)
        assert found.device is device
        for options in ({"learn": "both"}, {"branch_length": 8}, {"capacity_tokens": 1000}):
            assert isinstance(create("trie", **options), TrieStrategy)
        hybrid = create("hybrid")
        assert isinstance(hybrid, HybridStrategy)
        assert isinstance(hybrid.parts["trie"], DeviceStrategy)
        assert not hybrid.parts["trie"].backs_off
        with pytest.raises(ValueError, match="branch_length"):
            create("trie", branch_length=0)
        with pytest.raises(TypeError):
            create("trie", width=3)
    assert isinstance(create("trie"), TrieStrategy)


def test_an_arena_that_does_not_fit_is_told_once_and_the_host_drafts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_trie, "_free_bytes", lambda device: 100_000)
    with caplog.at_level(logging.INFO), drafts_on_device(SIZES, "cpu") as device:
        assert device is None
        assert isinstance(create("trie"), TrieStrategy)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "GB, and cpu has 0.0001 GB free: drafts are made by the host" in record.message
