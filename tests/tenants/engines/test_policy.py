"""How requests of a foreign engine are drafted for: by what tenants are configured with, and by nothing unknown."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood_errors import InvalidInputError
from draftwood_memory import MemoryOverrides
from draftwood_memory.engines.options import RequestChoice
from draftwood_memory.engines.session import Session, SessionRequest
from draftwood_memory.settings.memory_settings import MemorySettings
from draftwood_tenants.engines.following import TenantThread
from draftwood_tenants.engines.policy import Record, TenantPolicy
from draftwood_tenants.experiments.arm_assignment import ArmAssigner, ArmAssignment
from draftwood_tenants.experiments.outcomes import Outcome
from draftwood_tenants.followed import FollowedTenants
from draftwood_tenants.reading import ServerLimits
from tests.memory.engines.toy_engine import let_drafting_pay
from tests.memory.servers import Valkey, wait_for
from tests.tenants.engines.plugged import TEXT, ask, plugged

SETTINGS = MemorySettings(strategy="trie", max_draft_nodes=32)
LIMITS = ServerLimits("trie", 32, 1_000_000, 2**24)
FILE = """
tenants:
- {name: tenants/plain}
- {name: tenants/narrow, drafting: {strategy: trie, options: {branch_length: 4}, maxNodes: 9}}
- {name: tenants/fixed, allowDraftOverride: false, drafting: {strategy: jacobi}}
- {name: tenants/secret, learning: {scope: LEARNING_SCOPE_NOTHING}}
- {name: tenants/whole, learning: {scope: LEARNING_SCOPE_PROMPTS_AND_OUTPUTS, maxTokens: 2048, idleTtl: 60s}}
- {name: tenants/off, drafting: {strategy: none}}
- {name: tenants/other engines, quotas: {concurrency: 1}, weight: 2, sampling: {temperature: 0.5}}
experiments:
- name: experiments/x
  state: EXPERIMENT_STATE_RUNNING
  tenants: [acme]
  salt: 00112233445566778899aabbccddeeff
  coverage: 0.8
  arms:
  - {id: control, drafting: {strategy: trie, options: {branch_length: 8}}}
  - {id: short, drafting: {strategy: trie, maxNodes: 3}, memory: ARM_MEMORY_FORKED, weight: 2}
- name: experiments/y
  state: EXPERIMENT_STATE_RUNNING
  tenants: [talks]
  unit: EXPERIMENT_UNIT_SESSION
  arms: [{id: control}, {id: none, drafting: {strategy: none}}]
"""


@contextmanager
def policy_of(text: str, folder: Path, record: Record | None = None) -> Iterator[TenantPolicy]:
    (folder / "tenants.yaml").write_text(text)
    followed = FollowedTenants(None, None, folder / "tenants.yaml", None, LIMITS)
    thread = TenantThread(followed, "here")
    thread.start(5.0)
    yield TenantPolicy(followed.catalog, SETTINGS, "", record or thread.record)
    thread.close()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TenantPolicy]:
    with policy_of(FILE, tmp_path_factory.mktemp("file")) as found:
        yield found


@pytest.mark.parametrize(
    ("tenant", "says", "expected"),
    [
        (
            "plain",
            {},
            {"strategy": "trie", "max_nodes": 32, "learns": True, "overrides": MemoryOverrides(), "with_prompt": False},
        ),
        ("nobody configured it", {}, {"strategy": "trie", "max_nodes": 32, "learns": True}),
        ("other engines", {}, {"strategy": "trie", "max_nodes": 32, "learns": True, "overrides": MemoryOverrides()}),
        ("narrow", {}, {"strategy_options": (("branch_length", 4),), "max_nodes": 9}),
        ("narrow", {"max_nodes": 20}, {"strategy_options": (("branch_length", 4),), "max_nodes": 9}),
        ("narrow", {"max_nodes": 2}, {"max_nodes": 2}),
        ("narrow", {"strategy": "hybrid"}, {"strategy": "hybrid", "strategy_options": (), "max_nodes": 9}),
        ("narrow", {"on": False}, {"max_nodes": 0}),
        ("fixed", {}, {"strategy": "jacobi", "max_nodes": 32}),
        ("fixed", {"strategy": "trie", "max_nodes": 1}, {"strategy": "jacobi", "max_nodes": 32}),
        ("fixed", {"on": False}, {"strategy": "jacobi", "max_nodes": 32}),
        ("fixed", {"learns": False}, {"learns": False}),
        ("secret", {}, {"strategy": "trie", "max_nodes": 32, "learns": False}),
        ("plain", {"learns": False}, {"learns": False}),
        (
            "whole",
            {},
            {
                "learns": True,
                "with_prompt": True,
                "strategy_options": (("learn", "both"),),
                "overrides": MemoryOverrides(max_tokens=2048, idle_ttl=60.0),
            },
        ),
        ("off", {}, {"strategy": "none", "max_nodes": 0}),
        ("off", {"strategy": "trie"}, {"strategy": "trie", "max_nodes": 32}),
        ("", {}, {"strategy": "trie", "max_nodes": 32, "learns": False, "arm": ""}),
        ("", {"strategy": "jacobi"}, {"strategy": "jacobi"}),
        ("talks", {}, {"arm": ""}),  # sessions are the units
    ],
)
def test_a_tenants_configuration_decides(
    tenant: str, says: dict[str, Any], expected: dict[str, Any], policy: TenantPolicy
) -> None:
    found = policy.decide("1", RequestChoice(tenant, **says))
    assert {name: getattr(found, name) for name in expected} == expected


def test_what_requests_may_not_choose_is_ignored_and_logged_once_for_each_of_100_tenants(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tenants = [f"a{number}" for number in range(102)]
    listed = ", ".join(f"{{name: tenants/{tenant}, allowDraftOverride: false}}" for tenant in tenants)
    with policy_of(f"tenants: [{listed}]", tmp_path) as policy:
        for tenant in (*tenants, *tenants):
            policy.decide("1", RequestChoice(tenant, strategy="trie"))
    assert [(one.name, one.getMessage()) for one in caplog.records] == [
        ("draftwood", f"what requests say of drafts is ignored: tenants/{tenant} does not allow it")
        for tenant in tenants[:100]
    ]


def test_a_request_of_an_arm_is_recorded_once_if_it_wrote_anything(tmp_path: Path) -> None:
    recorded = list[tuple[ArmAssignment, Outcome]]()
    with policy_of(FILE, tmp_path, lambda *one: recorded.append(one)) as policy:

        def session(request_id: str, conversation: str, written: int) -> Session:
            given = {"draftwood_tenant": "talks", "draftwood_session": conversation}
            options = policy.options_of(request_id, given)
            assert bool(options.arm) == bool(conversation)
            found = Session(SessionRequest(request_id, np.arange(7, dtype=np.int32), "trie", 8, True), options)
            for token in range(written):
                found.advance(np.array([token], np.int32), time.perf_counter())
            return found

        in_arm = session("in an arm", "a talk", 3)
        others = [session("in no arm", "", 3), session("without an answer", "a talk", 0)]
        for one in (*others, in_arm, in_arm):
            policy.ended(one)
    [(assignment, outcome)] = recorded
    assert (assignment.label, assignment.unit) == (in_arm.options.arm, "a talk")
    assert (outcome.prompt_tokens, outcome.tokens) == (7, 2)


def by_hand(salt: bytes, tenant: str, unit: str, coverage: float, weights: tuple[float, ...]) -> int | None:
    """The arm as docs/experiments.md describes it."""
    joined = b"".join(len(part).to_bytes(8, "big") + part for part in (salt, tenant.encode(), unit.encode()))
    first, second = (int.from_bytes(hashlib.sha256(joined).digest()[at : at + 8], "big") / 2**64 for at in (0, 8))
    if first >= coverage:
        return None
    position = second * sum(weights)
    return next(arm for arm in range(len(weights)) if position < sum(weights[: arm + 1]))


@given(unit=st.text(max_size=40))
def test_the_arm_of_a_request_is_the_servers(policy: TenantPolicy, unit: str) -> None:
    salt = bytes.fromhex("00112233445566778899aabbccddeeff")
    expected = by_hand(salt, "acme", unit, 0.8, (1.0, 2.0)) if unit else None
    found = policy.decide(unit, RequestChoice("acme", session="not the unit"))
    assert found.arm == ("" if expected is None else ("x/control", "x/short")[expected])
    assert (found.strategy_options, found.max_nodes, found.overrides.forked) == {
        "": ((), 32, False),
        "x/control": ((("branch_length", 8),), 32, False),
        "x/short": ((), 3, True),
    }[found.arm]


@given(session=st.text(max_size=40))
def test_a_session_has_one_arm_whatever_its_requests_are_called(policy: TenantPolicy, session: str) -> None:
    found = {policy.decide(one, RequestChoice("talks", session=session)).arm for one in ("1", "2", "3")}
    assignment = ArmAssigner(policy._catalog).assign("talks", request_id="9", session=session, overridden=False)
    assert found == {"" if assignment is None else assignment.label}


def test_a_request_that_chooses_is_in_no_arm(policy: TenantPolicy) -> None:
    ids = [str(number) for number in range(50)]
    for says in ({"strategy": "trie"}, {"max_nodes": 5}, {"on": False}):
        assert {policy.decide(one, RequestChoice("acme", **says)).arm for one in ids} == {""}
    assert {policy.decide(one, RequestChoice("acme", learns=False)).arm for one in ids} > {"x/short"}
    assert {policy.decide(one, RequestChoice("")).arm for one in ids} == {""}


def test_the_file_is_read_again_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    with policy_of("tenants: [{name: tenants/a, drafting: {maxNodes: 3}}]", tmp_path) as policy:
        assert policy.decide("1", RequestChoice("a")).max_nodes == 3
        (tmp_path / "tenants.yaml").write_text("tenants: [{name: tenants/a, drafting: {maxNodes: 5}}]")
        wait_for(lambda: policy.decide("1", RequestChoice("a")).max_nodes == 5, "the change", 20.0)


def test_a_file_that_is_wrong_at_the_start_is_an_error_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text("tenants: [{name: tenants/a, drafting: {options: {x: 1}}}]")
    with pytest.raises(InvalidInputError, match=r"tenants\[0\]\.drafting\.options\.x"), plugged(tenants_file=str(path)):
        pass


def test_what_is_unknown_costs_drafts_and_learning_until_it_is_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The store is away when the engine starts: whether a tenant may be learned from is not known."""
    let_drafting_pay(monkeypatch)
    path = tmp_path / "tenants.yaml"
    path.write_text("tenants: [{name: tenants/of the file}]")
    with Valkey() as server:
        url = server.url
        server.pause()
        with plugged(store=url, store_timeout="0.3", tenants_file=str(path)) as made, caplog.at_level(logging.WARNING):
            assert [ask(made, str(n), tenant="acme") for n in range(3)] == [0, 0, 0]
            assert ask(made, "own", [*TEXT[:40], 999, *TEXT[:4]]) > 10  # without a tenant: its own text
            wait_for(lambda: not made.drafts.sessions, "requests to end", 20.0)
            assert made.drafts.memory.counters().learned == 0
            assert caplog.text.count("tenants/acme: its configuration could not be read from the store yet") == 1
            ask(made, "known", tenant="of the file")
            wait_for(lambda: made.drafts.memory.counters().learned == 1, "the file's tenant to be learned from", 20.0)
            server.resume()
            policy: Any = made.drafts.sessions.policy
            wait_for(lambda: policy._catalog._stored.read, "the store to be read", 20.0)
            ask(made, "4", tenant="acme")
            wait_for(lambda: made.drafts.memory.counters().learned == 2, "acme to be learned from", 20.0)
            assert ask(made, "5", tenant="acme") > 10


def test_no_store_and_no_file_follow_nothing() -> None:
    with plugged() as made:
        assert type(made.drafts.sessions.policy).__name__ == "SettingsPolicy"
