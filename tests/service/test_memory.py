"""Strategies by tenant."""

from __future__ import annotations

import pytest

from model_runner.errors import InvalidValueError
from service.memory import InProcessMemory
from strategies import UnknownStrategyError


def test_a_tenant_has_one_instance_of_a_strategy_and_never_anothers() -> None:
    memory = InProcessMemory(10)
    mine = memory.strategy("a", "trie")
    assert memory.strategy("a", "trie") is mine
    assert memory.strategy("b", "trie") is not mine
    assert memory.strategy("a", "none") is not mine
    assert memory.strategy("A", "trie") is not mine


def test_the_tenant_that_asked_longest_ago_leaves() -> None:
    memory = InProcessMemory(2)
    first = memory.strategy("a", "trie")
    memory.strategy("b", "trie")
    assert memory.strategy("a", "trie") is first
    memory.strategy("c", "trie")
    assert "b" not in memory
    assert len(memory) == 2
    assert memory.strategy("a", "trie") is first


def test_an_unknown_strategy_leaves_no_tenant_behind() -> None:
    memory = InProcessMemory(2)
    with pytest.raises(UnknownStrategyError):
        memory.strategy("a", "oracle")
    assert len(memory) == 0


def test_no_tenants_are_too_few() -> None:
    with pytest.raises(InvalidValueError, match="max_tenants: 0"):
        InProcessMemory(0)
