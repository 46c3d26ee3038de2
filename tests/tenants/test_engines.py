"""Tenants and experiments in a foreign engine: its drafts are those that a server decides, and its counts too."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from itertools import count, dropwhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.admin.v1.experiments_pb2 import StoppedArm
from draftwood_errors import InvalidInputError
from draftwood_memory import MemoryOverrides
from draftwood_memory.engines.drafts import Host
from draftwood_memory.engines.options import RequestChoice, RequestOptions
from draftwood_memory.engines.session import Session, SessionRequest
from draftwood_memory.settings import MemorySettings
from draftwood_service.experiments import watch
from draftwood_service.experiments.watch import stop_arms
from draftwood_strategies.base import DraftStats
from draftwood_strategies.draft_engine.engine import Verifies
from draftwood_strategies.drafting import DraftChoice, Drafting
from draftwood_tenants.engines import OpenedDrafts, Record, ServedModel, TenantPolicy, TenantThread, outcome_of
from draftwood_tenants.experiments import arms as counting
from draftwood_tenants.experiments.arms import ArmAssignment, Running
from draftwood_tenants.experiments.counts import Outcome
from draftwood_tenants.experiments.definition import ExperimentConfig
from draftwood_tenants.followed import FollowedTenants
from draftwood_tenants.reading import ServerLimits
from draftwood_tenants.resources import follower
from tests.memory.engines.test_drafts import rested
from tests.memory.engines.toy_engine import CheapTokens, Model, ToyEngine, let_drafting_pay, recitation
from tests.memory.servers import Valkey, wait_for
from tests.service.experiments.test_live import (
    all_asked,
    arm_of,
    catalog,
    fix_salts,
    read,
    requests_counted,
    split_of,
    started,
)
from tests.service.fakes import serving, until
from tests.strategies.fakes import own_records

TEXT = np.random.default_rng(3).integers(0, 900, 60).tolist()
OTHER = np.random.default_rng(4).integers(0, 900, 60).tolist()
MODEL: Model = recitation(TEXT, OTHER)


@contextmanager
def plugged(**variables: str) -> Iterator[ToyEngine]:
    """An engine whose process has variables `DRAFTWOOD_...`, here without that beginning."""
    made = ToyEngine(MODEL)
    environ = {f"DRAFTWOOD_{name.upper()}": value for name, value in variables.items()}
    model = ServedModel(None, "m", {}, 1000)
    environ["XDG_CACHE_HOME"] = "/nonexistent"
    host = Host(Verifies.CHAINS, 8, lambda request_id: request_id in made.requests, CheapTokens)
    opened = OpenedDrafts("vLLM", environ, model, host)
    made.drafts = opened.drafts
    try:
        yield made
    finally:
        opened.close()


def ask(made: ToyEngine, request_id: str, prompt: list[int] = TEXT[:4], **options: Any) -> int:
    """Runs a request alone; the number of tokens that were drafted for it. Options without "draftwood_"."""
    made.add(request_id, prompt, 24, **{f"draftwood_{name}": value for name, value in options.items()})
    made.run()
    return made.finished[request_id].drafted


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
- {name: tenants/other-engines, quotas: {concurrency: 1}, weight: 2, sampling: {temperature: 0.5}}
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
    thread.start(60.0)
    yield TenantPolicy(followed.catalog, SETTINGS, "", record or thread.record)
    thread.close()


def choice(tenant: str, *, session: str = "", learns: bool = True, **drafting: Any) -> RequestChoice:
    return RequestChoice(tenant, session, DraftChoice(**drafting), learns)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TenantPolicy]:
    with policy_of(FILE, tmp_path_factory.mktemp("file")) as found:
        yield found


DEFAULT = {"strategy": "trie", "max_nodes": 32, "learns": True, "overrides": MemoryOverrides(), "with_prompt": False}
WHOLE = {"with_prompt": True, "options": (("learn", "both"),)}


@pytest.mark.parametrize(
    ("tenant", "says", "expected"),
    [
        ("plain", {}, DEFAULT),
        ("plain", {"learns": False}, {**DEFAULT, "learns": False}),
        ("nobody.configured.it", {}, DEFAULT),
        ("other-engines", {}, DEFAULT),
        ("narrow", {}, {"options": (("branch_length", 4),), "max_nodes": 9}),
        ("narrow", {"max_nodes": 20}, {"options": (("branch_length", 4),), "max_nodes": 9}),
        ("narrow", {"max_nodes": 2}, {"max_nodes": 2}),
        ("narrow", {"strategy": "hybrid"}, {"strategy": "hybrid", "options": (), "max_nodes": 9}),
        ("narrow", {"enabled": False}, {"max_nodes": 0}),
        ("fixed", {"strategy": "trie", "max_nodes": 1}, {"strategy": "jacobi", "max_nodes": 32}),
        ("fixed", {"enabled": False}, {"strategy": "jacobi", "max_nodes": 32}),
        ("fixed", {"learns": False}, {"learns": False}),
        ("secret", {}, {**DEFAULT, "learns": False}),
        ("whole", {}, {**DEFAULT, **WHOLE, "overrides": MemoryOverrides(max_tokens=2048, idle_ttl=60.0)}),
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
    decided = policy.decide("1", choice(tenant, **says))
    holders = {field.name: part for part in (decided, decided.drafting) for field in fields(part)}
    assert {name: getattr(holders[name], name) for name in expected} == expected


def test_what_requests_may_not_choose_is_ignored_and_logged_once_for_each_of_100_tenants(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tenants = [f"a{number}" for number in range(102)]
    listed = ", ".join(f"{{name: tenants/{tenant}, allowDraftOverride: false}}" for tenant in tenants)
    with policy_of(f"tenants: [{listed}]", tmp_path) as policy:
        for tenant in (*tenants, *tenants):
            policy.decide("1", choice(tenant, strategy="trie"))
    logged = [(record.name, record.getMessage()) for record in own_records(caplog)]
    assert logged == [
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
            request = SessionRequest(request_id, np.arange(7, dtype=np.int32), options.drafting, True)
            found = Session(request, DraftStats(), options=options)
            for token in range(written):
                found.advance(np.array([token], np.int32), time.perf_counter())
            return found

        in_arm = session("in an arm", "a talk", 3)
        others = [session("in no arm", "", 3), session("without an answer", "a talk", 0)]
        for one in (*others, in_arm, in_arm):
            policy.ended(one)
    [(assignment, outcome)] = recorded
    assert (assignment.label, assignment.unit) == (in_arm.options.arm, "a talk")
    assert outcome.tokens == 2


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
    found = policy.decide(unit, choice("acme", session="not the unit"))
    assert found.arm == ("" if expected is None else ("x/control", "x/short")[expected])
    assert (found.drafting.options, found.drafting.max_nodes, found.overrides.forked) == {
        "": ((), 32, False),
        "x/control": ((("branch_length", 8),), 32, False),
        "x/short": ((), 3, True),
    }[found.arm]


def test_a_request_that_chooses_is_in_no_arm(policy: TenantPolicy) -> None:
    ids = [str(number) for number in range(50)]
    for says in ({"strategy": "trie"}, {"max_nodes": 5}, {"enabled": False}):
        assert {policy.decide(one, choice("acme", **says)).arm for one in ids} == {""}
    assert {policy.decide(one, choice("acme", learns=False)).arm for one in ids} > {"x/short"}
    assert {policy.decide(one, choice("")).arm for one in ids} == {""}


def test_the_file_is_read_again(tmp_path: Path) -> None:
    with policy_of("tenants: [{name: tenants/a, drafting: {maxNodes: 3}}]", tmp_path) as policy:
        assert policy.decide("1", choice("a")).drafting.max_nodes == 3
        (tmp_path / "tenants.yaml").write_text("tenants: [{name: tenants/a, drafting: {maxNodes: 5}}]")
        wait_for(lambda: policy.decide("1", choice("a")).drafting.max_nodes == 5, "the change")


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
    path.write_text("tenants: [{name: tenants/of-the-file}]")
    with Valkey() as server:
        url = server.url
        server.pause()
        with plugged(store=url, store_timeout="0.3", tenants_file=str(path)) as made, caplog.at_level(logging.WARNING):
            assert [ask(made, str(n), tenant="acme") for n in range(3)] == [0, 0, 0]
            assert ask(made, "own", [*TEXT[:40], 999, *TEXT[:4]]) > 10  # without a tenant: its own text
            rested(made)
            assert made.drafts.memory.counters().learned == 0
            assert caplog.text.count("tenants/acme: its configuration could not be read from the store yet") == 1
            ask(made, "known", tenant="of-the-file")
            wait_for(lambda: made.drafts.memory.counters().learned == 1, "the file's tenant to be learned from")
            server.resume()
            policy: Any = made.drafts.sessions.policy
            wait_for(lambda: policy._catalog._stored.read, "the store to be read")
            ask(made, "4", tenant="acme")
            wait_for(lambda: made.drafts.memory.counters().learned == 2, "acme to be learned from")
            numbers = count(5)
            wait_for(lambda: ask(made, str(next(numbers)), tenant="acme") > 10, "acme's memory to be there")


def test_no_store_and_no_file_follow_nothing() -> None:
    with plugged() as made:
        assert type(made.drafts.sessions.policy).__name__ == "SettingsPolicy"


IDS = [f"request {number}" for number in range(60)]
ARMS = [{"id": "trie", "drafting": {"strategy": "trie"}}, {"id": "off", "drafting": {"strategy": "none"}}]


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    let_drafting_pay(monkeypatch)
    monkeypatch.setattr("draftwood_memory.memory._FIRST_WAIT", 20.0)  # a busy machine may take longer than 50 ms
    fix_salts(monkeypatch)
    for module in (counting, watch, follower):
        monkeypatch.setattr(module, "POLL_SECONDS", 0.05)


def known(made: ToyEngine) -> list[ExperimentConfig]:
    """The experiments that the engine's process has read of."""
    policy: Any = made.drafts.sessions.policy
    return [*policy._catalog.experiments()]


async def knows(made: ToyEngine, arm: str = "") -> None:
    """Until it knows the experiment, and has the memory of an arm."""
    await until(lambda: any(one.started_at for one in known(made)))
    if arm:
        await asyncio.to_thread(made.drafts.memory.strategy, "acme", "trie", arm)


def session(pieces: list[list[int]], accepted: int = 0, stops: tuple[int, ...] = ()) -> Session:
    prompt = np.arange(7, dtype=np.int32)
    drafting = Drafting("trie", (), 8)
    request, options = SessionRequest("1", prompt, drafting, True), RequestOptions("a", drafting, True)
    found = Session(request, DraftStats(), options=options, stop_token_ids=stops)
    now = time.perf_counter() - 10.0
    for number, piece in enumerate(pieces):
        found.advance(np.array(piece, np.int32), now + 0.5 * number)
    found.stats.draft_tokens, found.stats.accepted_tokens = 3 * accepted, accepted
    return found


def test_what_a_request_counts_for() -> None:
    found = outcome_of(session([[1], [2, 3, 4], [5, 6]], accepted=3))
    assert found is not None
    assert (found.tokens, found.steps, found.decode_seconds) == (5, 2, 1.0)
    assert (found.draft_nodes, found.accepted_tokens, found.erred, found.ttft_seconds) == (9, 3, False, None)
    assert found.arrived_at == pytest.approx(time.time() - 10.0, abs=5.0)
    assert outcome_of(session([])) is None, "without a token"


@pytest.mark.parametrize(
    ("pieces", "accepted", "counted"),
    [
        ([[1], [2, 3, 9, 4, 5]], 4, (3, 1, 3)),  # the draft went on behind the end, and the model agreed
        ([[9], [9, 9], [3]], 1, (3, 2, 1)),  # min_tokens: it did not end there
        ([[1], [2, 9]], 1, (2, 1, 1)),
        ([[1]], 0, (0, 0, 0)),
    ],
)
def test_tokens_behind_the_end_are_nobodys(
    pieces: list[list[int]], accepted: int, counted: tuple[int, int, int]
) -> None:
    found = outcome_of(session(pieces, accepted, stops=(9,)))
    assert found is not None
    assert (found.tokens, found.steps, found.accepted_tokens) == counted
    assert (found.decode_seconds == 0.0) == (len(pieces) == 1)


async def test_a_servers_report_shows_the_requests_of_both_kinds_of_engines(server: Valkey) -> None:
    async with serving(store=server.url, strategy="trie") as served:
        experiment = await started(served, ARMS, coverage=0.9)
        split = split_of(experiment, ("trie", "off"))
        here = [arm_of(split, unit) for unit in IDS]
        with plugged(store=server.url) as made:
            await knows(made, "x/trie")
            assigned = await all_asked(served, IDS[:20])
            assert [one.arm for one in assigned] == here[:20]
            drafted = {unit: await asyncio.to_thread(ask, made, unit, tenant="acme") for unit in IDS[20:]}
            await asyncio.to_thread(ask, made, "chooses", tenant="acme", strategy="trie")
            await asyncio.to_thread(ask, made, "of nobody")
            # Those outside of the experiment are few, and their memory may still be on its way.
            assert {arm for unit, arm in zip(IDS, here, strict=True) if drafted.get(unit)} - {""} == {"trie"}
            inside = [arm for arm in here if arm]
            assert sum(await requests_counted(served, len(inside))) == len(inside)
            found = await read(served)
        assert [row.requests for row in found.arms] == [inside.count("trie"), inside.count("off")]
        assert [row.units for row in found.arms] == [inside.count("trie"), inside.count("off")]
        assert [row.errors for row in found.arms] == [0, 0]
        assert found.servers == 2
        assert not found.sample_ratio_mismatch
        of_server = [arm for arm in here[:20] if arm]
        assert of_server
        for row in found.arms:  # the server's requests alone have a TTFT, and it is theirs
            assert 0 < row.metrics["ttft_seconds_mean"] < 5.0
            assert row.metrics["tokens_per_step"] > 0
        assert found.arms[0].metrics["tokens_per_step"] > 1.2 * found.arms[1].metrics["tokens_per_step"]
        assert sum(await requests_counted(served, 0)) == len(inside)  # closing counts nothing twice


async def test_a_stopped_arm_is_drafted_for_as_the_control_and_not_counted(server: Valkey) -> None:
    async with serving(store=server.url, strategy="trie") as served:
        experiment = await started(served, [*ARMS, {"id": "other", "drafting": {"strategy": "none"}}])
        split = split_of(experiment, ("trie", "off", "other"))
        units = [unit for unit in IDS if arm_of(split, unit) == "off"]
        with plugged(store=server.url) as made:
            await knows(made, "x/trie")
            await asyncio.to_thread(ask, made, "first", tenant="acme")
            before = [await asyncio.to_thread(ask, made, unit, tenant="acme") for unit in units[:4]]
            assert before == [0] * 4
            counted = 4 + (arm_of(split, "first") == "off")
            assert (await requests_counted(served, 5))[1] == counted
            [config] = catalog(served).experiments()
            await stop_arms(
                served.server.tenants.stored,
                catalog(served),
                Running.of(config),
                [StoppedArm(arm="off", guardrail="errors", reason="it erred")],
            )
            await until(lambda: bool(known(made)[0].stopped))
            after = [await asyncio.to_thread(ask, made, unit, tenant="acme") for unit in units[4:]]
            drafted = [*dropwhile(lambda count: count <= 10, after)]  # until the control's memory has an answer
            assert len(drafted) >= 3
            assert min(drafted) > 10
            control = next(unit for unit in IDS if arm_of(split, unit) == "trie")
            await asyncio.to_thread(ask, made, control, tenant="acme")  # is counted after them
            assert (await requests_counted(served, 6))[1] == counted


@pytest.mark.system
async def test_live_requests_are_not_counted_when_the_process_ends(server: Valkey) -> None:
    """They are under way, as those of a server that stops."""
    async with serving(store=server.url, strategy="trie") as served:
        await started(served, ARMS)
        with plugged(store=server.url) as made:
            await knows(made)
            await asyncio.to_thread(ask, made, "ends", tenant="acme")
            made.add("goes on", TEXT[:4], 24, draftwood_tenant="acme")
            for _ in range(3):
                made.step()
            assert sum(await requests_counted(served, 1)) == 1
        assert sum(await requests_counted(served, 1)) == 1


async def test_a_request_that_was_aborted_counts_with_what_it_wrote(server: Valkey) -> None:
    async with serving(store=server.url, strategy="trie") as served:
        await started(served, [{"id": "off", "drafting": {"strategy": "none"}}, *ARMS[:1]], coverage=1.0)
        with plugged(store=server.url) as made:
            await knows(made)
            made.add("1", TEXT[:4], 24, draftwood_tenant="acme")
            made.step()
            made.step()
            made.abort("1")
            made.add("never written to", TEXT[:4], 24, draftwood_tenant="acme")
            made.abort("never written to")
            assert sum(await requests_counted(served, 1)) == 1
            assert sum(row.errors for row in (await read(served)).arms) == 0
