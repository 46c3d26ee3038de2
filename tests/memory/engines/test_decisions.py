"""Whose word counts for how a request is drafted."""

from __future__ import annotations

from typing import Any

import pytest

from draftwood_memory.engines.options import TRUSTED, RequestOptions
from draftwood_memory.engines.policy import DecidedPolicy, SettingsPolicy
from draftwood_memory.settings import MemorySettings
from draftwood_strategies.drafting import Drafting

CALLERS = {"draftwood_tenant": "victim", "draftwood_strategy": "trie", "draftwood_max_nodes": 8}
DECIDED = {
    "tenant": "acme",
    "drafting": ["trie", [["branch_length", 8]], 4],
    "learns": False,
    "overrides": {"max_tokens": 1000},
}


def test_in_an_engine_that_the_service_runs_a_caller_decides_nothing() -> None:
    policy = DecidedPolicy()
    found = policy.options_of("1", {**CALLERS, TRUSTED: DECIDED})
    assert (found.tenant, found.drafting.max_nodes, found.learns) == ("acme", 4, False)
    assert found.drafting.options == (("branch_length", 8),)
    assert found.overrides.max_tokens == 1000
    alone = policy.options_of("2", CALLERS)
    assert (alone.tenant, alone.drafting.max_nodes, alone.learns) == ("", 0, False)
    text = policy.options_of("3", {TRUSTED: '{"tenant": "victim"}'})  # as an API with texts alone could carry it
    assert (text.tenant, text.drafting.max_nodes) == ("", 0)


def test_in_any_other_engine_what_the_service_would_have_decided_counts_for_nothing() -> None:
    policy = SettingsPolicy(MemorySettings(strategy="trie"), "")
    found = policy.options_of("1", {TRUSTED: {**DECIDED, "tenant": "victim"}})
    assert (found.tenant, found.learns) == ("", False)


@pytest.mark.parametrize(
    ("usual", "given", "expected"),
    [
        ("trie", None, ("default", "trie", 16, True)),
        ("trie", {"draftwood_tenant": "acme"}, ("acme", "trie", 16, True)),
        ("trie", {"draftwood_tenant": ""}, ("", "trie", 16, False)),
        ("trie", {"draftwood_learn": "off"}, ("default", "trie", 16, False)),
        ("trie", {"draftwood_strategy": "hybrid"}, ("default", "hybrid", 16, True)),
        ("trie", {"draftwood_strategy": "none"}, ("default", "none", 0, True)),
        ("trie", {"draftwood_max_nodes": 4}, ("default", "trie", 4, True)),
        ("trie", {"draftwood_max_nodes": 99}, ("default", "trie", 16, True)),
        ("trie", {"draftwood": "off"}, ("default", "none", 0, True)),
        ("none", None, ("default", "none", 0, True)),
        ("none", {"draftwood_strategy": "trie"}, ("default", "trie", 16, True)),
    ],
)
def test_a_request_chooses_within_the_settings_of_the_process(
    usual: str, given: dict[str, Any] | None, expected: tuple[str, str, int, bool]
) -> None:
    policy = SettingsPolicy(MemorySettings(strategy=usual, max_draft_nodes=16), "default")
    tenant, strategy, max_nodes, learns = expected
    assert policy.options_of("1", given) == RequestOptions(tenant, Drafting(strategy, (), max_nodes), learns)
