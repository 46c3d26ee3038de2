"""Experiments in a foreign engine: counted where a server counts, so that its report shows them; stopped with it."""

from __future__ import annotations

import asyncio
import time
from itertools import dropwhile
from typing import Any

import numpy as np
import pytest

from draftwood.admin.v1.experiments_pb2 import StoppedArm
from draftwood_memory.engines.options import RequestOptions
from draftwood_memory.engines.session import Session, SessionRequest
from draftwood_service.experiments import watch
from draftwood_service.experiments.stopping import stop_arms
from draftwood_tenants.engines.measuring import outcome_of
from draftwood_tenants.experiments import counting
from draftwood_tenants.experiments.arm_assignment import Running
from draftwood_tenants.experiments.definition import ExperimentConfig
from draftwood_tenants.resources import follower
from tests.memory.engines.toy_engine import ToyEngine, let_drafting_pay
from tests.memory.servers import Valkey
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
from tests.tenants.engines.plugged import TEXT, ask, plugged

IDS = [f"request {number}" for number in range(60)]
ARMS = [{"id": "trie", "drafting": {"strategy": "trie"}}, {"id": "off", "drafting": {"strategy": "none"}}]


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    let_drafting_pay(monkeypatch)
    fix_salts(monkeypatch)
    for module in (counting, watch, follower):
        monkeypatch.setattr(module, "SECONDS", 0.05)


def known(made: ToyEngine) -> list[ExperimentConfig]:
    """The experiments that the engine's process has read of."""
    policy: Any = made.drafts.sessions.policy
    return [*policy._catalog.experiments()]


async def knows(made: ToyEngine) -> None:
    await until(lambda: any(one.started_at for one in known(made)))


def session(pieces: list[list[int]], accepted: int = 0, stops: tuple[int, ...] = ()) -> Session:
    prompt = np.arange(7, dtype=np.int32)
    found = Session(
        SessionRequest("1", prompt, "trie", 8, True), RequestOptions("a", "trie", 8, True), stop_token_ids=stops
    )
    now = time.perf_counter() - 10.0
    for number, piece in enumerate(pieces):
        found.advance(np.array(piece, np.int32), now + 0.5 * number)
    found.stats.drafted, found.stats.accepted = 3 * accepted, accepted
    return found


def test_what_a_request_counts_for() -> None:
    found = outcome_of(session([[1], [2, 3, 4], [5, 6]], accepted=3))
    assert found is not None
    assert (found.prompt_tokens, found.tokens, found.steps, found.decode_seconds) == (7, 5, 2, 1.0)
    assert (found.draft_nodes, found.accepted_tokens, found.erred, found.ttft_seconds) == (9, 3, False, None)
    assert found.arrived_at == pytest.approx(time.time() - 10.0, abs=0.5)


def test_tokens_behind_the_end_are_nobodys() -> None:
    """The draft went on behind the token that ends the answer, and the model agreed."""
    found = outcome_of(session([[1], [2, 3, 9, 4, 5]], accepted=4, stops=(9,)))
    assert found is not None
    assert (found.tokens, found.steps, found.accepted_tokens) == (3, 1, 3)
    early = outcome_of(session([[9], [9, 9], [3]], accepted=1, stops=(9,)))  # min_tokens: it did not end there
    assert early is not None
    assert (early.tokens, early.accepted_tokens) == (3, 1)
    at_its_end = outcome_of(session([[1], [2, 9]], accepted=1, stops=(9,)))
    assert at_its_end is not None
    assert (at_its_end.tokens, at_its_end.accepted_tokens) == (2, 1)


def test_a_request_of_one_token_has_no_time_and_one_without_any_counts_for_nothing() -> None:
    found = outcome_of(session([[1]]))
    assert found is not None
    assert (found.tokens, found.steps, found.decode_seconds) == (0, 0, 0.0)
    assert outcome_of(session([])) is None


async def test_a_servers_report_shows_the_requests_of_both_kinds_of_engines(server: Valkey) -> None:
    async with serving(store=server.url, strategy="trie") as served:
        experiment = await started(served, ARMS, coverage=0.9)
        split = split_of(experiment, ("trie", "off"))
        here = [arm_of(split, unit) for unit in IDS]
        with plugged(store=server.url) as made:
            await knows(made)
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
            assert 0 < row.metrics["mean time to first token"] < 5.0
            assert row.metrics["tokens per step"] > 0
        assert found.arms[0].metrics["tokens per step"] > 1.2 * found.arms[1].metrics["tokens per step"]
        assert sum(await requests_counted(served, 0)) == len(inside)  # closing counts nothing twice


async def test_a_stopped_arm_is_drafted_for_as_the_control_and_not_counted(server: Valkey) -> None:
    async with serving(store=server.url, strategy="trie") as served:
        experiment = await started(served, [*ARMS, {"id": "other", "drafting": {"strategy": "none"}}])
        split = split_of(experiment, ("trie", "off", "other"))
        units = [unit for unit in IDS if arm_of(split, unit) == "off"]
        with plugged(store=server.url) as made:
            await knows(made)
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
            began = time.perf_counter()
            await until(lambda: bool(known(made)[0].stopped))
            assert time.perf_counter() - began < 1.0
            after = [await asyncio.to_thread(ask, made, unit, tenant="acme") for unit in units[4:]]
            drafted = [*dropwhile(lambda count: count <= 10, after)]  # until the control's memory is there
            assert len(drafted) >= 3
            assert min(drafted) > 10
            await asyncio.sleep(0.3)
            assert (await requests_counted(served, 0))[1] == counted


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
        await asyncio.sleep(1.0)
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
