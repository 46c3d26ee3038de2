"""What a process drafts with while it has an arena."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from draftwood_strategies import NoDrafts, create
from draftwood_strategies.device import trie as device_trie
from draftwood_strategies.device.arena import DeviceSizes
from draftwood_strategies.device.strategy import DeviceStrategy, drafts_on_device
from draftwood_strategies.mixing.hybrid import HybridStrategy
from draftwood_strategies.registry import offered
from draftwood_strategies.trie.strategy import TrieStrategy
from tests.strategies.fakes import own_records

SIZES = DeviceSizes(rows=2, row_tokens=64, tenants=2, tenant_tokens=1024, contexts=1024)


def test_what_the_arena_takes_is_on_the_device_while_there_is_one() -> None:
    with drafts_on_device(SIZES, "cpu") as device:
        found = create("trie", capacity_tokens=2000)
        assert isinstance(found, DeviceStrategy)
        assert found.device is device
        options: Any
        for options in ({"learn": "both"}, {"branch_length": 8}, {"capacity_tokens": 1000}):
            assert isinstance(create("trie", **options), TrieStrategy)
        for name, options in (
            ("recycling", {}),
            ("recycling", {"capacity_contexts": 1024}),
            ("hybrid", {}),
            ("hybrid", {"sources": "recycling, trie", "capacity_tokens": 2000}),
        ):
            mixing = create(name, **options)
            assert isinstance(mixing, DeviceStrategy)
            assert not mixing.backs_off
        with pytest.raises(ValueError, match="branch_length"):
            create("trie", branch_length=0)
        for name in ("trie", "recycling", "hybrid"):
            with pytest.raises(TypeError):
                create(name, width=3)
    assert isinstance(create("trie"), TrieStrategy)


def test_hybrids_that_the_arena_does_not_take_mix_on_the_host() -> None:
    """The trie's part may be on the device all the same."""
    cases: list[tuple[DeviceSizes, Any, bool]] = [
        (SIZES, {"sources": "trie,recycling,jacobi"}, True),
        (SIZES, {"learn": "both"}, False),
        (replace(SIZES, contexts=0), {}, True),
        (replace(SIZES, contexts=4096), {"capacity_contexts": 2048}, True),
    ]
    for sizes, options, trie_on_device in cases:
        with drafts_on_device(sizes, "cpu"):
            hybrid = create("hybrid", **options)
            assert isinstance(hybrid, HybridStrategy)
            assert isinstance(hybrid.parts["trie"], DeviceStrategy) is trie_on_device
            assert hybrid.table_name == "recycling"
            assert isinstance(create("recycling"), DeviceStrategy) is (sizes.contexts > 0)
    with offered("head", NoDrafts), drafts_on_device(SIZES, "cpu"):
        hybrid = create("hybrid")
        assert isinstance(hybrid, HybridStrategy)
        assert isinstance(hybrid.parts["trie"], DeviceStrategy)
        assert [*hybrid.parts] == ["trie", "head"]
        assert isinstance(create("hybrid", sources="trie,recycling"), DeviceStrategy)


def test_an_arena_that_does_not_fit_is_told_once_and_the_host_drafts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_trie, "_free_bytes", lambda device: 100_000)
    with caplog.at_level(logging.INFO), drafts_on_device(SIZES, "cpu") as device:
        assert device is None
        assert isinstance(create("trie"), TrieStrategy)
    [record] = own_records(caplog)
    assert record.levelname == "WARNING"
    assert "GB, and cpu has 0.0001 GB free: drafts are made by the host" in record.message
