"""Drafts and memories, on every engine."""

from __future__ import annotations

from typing import Any

import pytest

from draftwood_client import Client, Completion, MemoryClient, NotFoundError
from tests.engines.servers import Served, until

PROMPT = [1, *range(700, 730)]
OPTIONS: Any = {"max_tokens": 40, "ignore_eos": True}


def drafted(client: Client, tenant: str, **options: Any) -> Completion:
    answer = client.generate(PROMPT, tenant=tenant, **{**OPTIONS, **options})
    assert len(answer.token_ids) == OPTIONS["max_tokens"]
    return answer


def accepted(client: Client, tenant: str, **options: Any) -> int:
    """Draft tokens of an answer that were accepted."""
    return drafted(client, tenant, **options).drafting.accepted_tokens


def learned(client: Client, tenant: str, **options: Any) -> Completion:
    """An answer that the tenant's earlier one drafts, once the memory has learned that."""
    client.generate(PROMPT, tenant=tenant, **OPTIONS)
    answers: list[Completion] = []

    def is_drafted() -> bool:
        answers.append(drafted(client, tenant, learn=False, **options))
        return answers[-1].drafting.accepted_tokens >= 15

    until(is_drafted)
    return answers[-1]


def test_a_tenants_answers_draft_its_own_requests_and_no_others(client: Client) -> None:
    learned(client, "acme")
    assert max(accepted(client, f"other-{i}", learn=False) for i in range(3)) < 15


def test_drafts_can_be_switched_off_and_capped(client: Client) -> None:
    learned(client, "options")
    for off in ({"drafting": False}, {"strategy": "none"}, {"max_draft_nodes": 0}):
        assert accepted(client, "options", **off) == 0, off
    capped = drafted(client, "options", max_draft_nodes=2).drafting
    assert capped.draft_tokens <= 2 * capped.steps
    assert len(capped.accepted_by_depth) <= 2
    assert sum(capped.accepted_by_depth) == capped.accepted_tokens


def test_statistics_of_drafts_add_up(client: Client) -> None:
    answer = learned(client, "statistics")
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
    learned(client, "purged")
    with MemoryClient(served.target) as memory:
        until(lambda: any(len(tokens) >= 40 for tokens in exported(memory, "purged")))
        memory.purge("purged")
        assert not exported(memory, "purged")
    until(lambda: accepted(client, "purged", learn=False) < 15)
