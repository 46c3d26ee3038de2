"""Drafts and memories, on every engine."""

from __future__ import annotations

import time
from typing import Any

import pytest

from draftwood_client import Client, MemoryClient, NotFoundError
from tests.engines.servers import Served, until

PROMPT = [1, *range(700, 730)]
OPTIONS: Any = {"max_tokens": 40, "ignore_eos": True}


def accepted(client: Client, tenant: str, **options: Any) -> int:
    """Draft tokens of an answer that were accepted."""
    answer = client.generate(PROMPT, tenant=tenant, **{**OPTIONS, **options})
    assert len(answer.token_ids) == OPTIONS["max_tokens"]
    return answer.drafting.accepted_tokens


def accepted_after_learning(client: Client, tenant: str, seconds: float = 10.0) -> int:
    """Draft tokens accepted once the memory has learned the answer, which may take `seconds`."""
    accepted(client, tenant)
    found = 0
    deadline = time.monotonic() + seconds
    while found < 15 and time.monotonic() < deadline:
        found = accepted(client, tenant, learn=False)
    return found


def test_a_tenants_answers_draft_its_own_requests_and_no_others(client: Client) -> None:
    assert accepted_after_learning(client, "acme") >= 15
    assert max(accepted(client, f"other-{i}", learn=False) for i in range(3)) < 15


def test_drafts_can_be_switched_off_and_capped(client: Client) -> None:
    assert accepted_after_learning(client, "options") >= 15
    assert accepted(client, "options", drafting=False) == 0
    assert accepted(client, "options", strategy="none") == 0
    assert accepted(client, "options", max_draft_nodes=0) == 0
    capped = client.generate(PROMPT, tenant="options", max_draft_nodes=2, **OPTIONS)
    assert capped.drafting.draft_tokens <= 2 * capped.drafting.steps
    by_depth = capped.drafting.accepted_by_depth
    assert len(by_depth) <= 2
    assert sum(by_depth) == capped.drafting.accepted_tokens


def test_statistics_of_drafts_add_up(client: Client, served: Served) -> None:
    assert accepted_after_learning(client, "statistics") >= 15
    answer = client.generate(PROMPT, tenant="statistics", **OPTIONS)
    drafting = answer.drafting
    assert drafting.steps + drafting.accepted_tokens == 40
    assert drafting.mean_acceptance_length == pytest.approx(40 / drafting.steps)
    assert drafting.draft_tokens >= drafting.accepted_tokens == sum(drafting.accepted_by_depth)
    assert sum(source.accepted_tokens for source in drafting.by_source.values()) == drafting.accepted_tokens
    stopped = client.generate(PROMPT, tenant="statistics", max_tokens=40, ignore_eos=True, stop=[answer.text[20:26]])
    assert stopped.drafting.draft_tokens >= stopped.drafting.accepted_tokens
    assert 0 < answer.timings.decode < 60
    assert answer.usage.cached_prompt_tokens <= len(PROMPT)
    assert drafting.draft_time > 0


def test_nothing_is_learned_where_nothing_shall_be(client: Client) -> None:
    for _ in range(3):
        assert accepted(client, "forgets", learn=False) < 15
        assert accepted(client, "silent") < 15


def exported(memory: MemoryClient, tenant: str) -> list[tuple[int, ...]]:
    """The records of a tenant, of which a server may know nothing."""
    try:
        return [tuple(record.token_ids) for record in memory.export(tenant=tenant).records]
    except NotFoundError:
        return []


def test_memories_are_exported_and_purged(client: Client, served: Served) -> None:
    assert accepted_after_learning(client, "purged") >= 15
    with MemoryClient(served.target) as memory:
        until(lambda: any(len(tokens) >= 40 for tokens in exported(memory, "purged")), 10)
        memory.purge("purged")
        assert not exported(memory, "purged")
    until(lambda: accepted(client, "purged", learn=False) < 15, 10)
