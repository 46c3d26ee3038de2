"""Drafts for the rows of a foreign engine: lossless, per tenant, whatever the engine does with its requests."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest

from draftwood_memory import Memory, RedisClient
from draftwood_memory.engines import exclusion
from draftwood_memory.engines.drafts import MAX_FAILURES, PAUSE_SECONDS, EngineDrafts, Host
from draftwood_memory.engines.policy import SettingsPolicy
from draftwood_memory.engines.session import Row
from draftwood_memory.memory import StrategyUse
from draftwood_memory.settings import MemorySettings
from draftwood_strategies import Strategy, create, strategy_names
from draftwood_strategies.draft_engine import guard as timed_calls
from draftwood_strategies.draft_engine.engine import Verifies
from draftwood_strategies.draft_engine.guard import GuardedDrafter
from tests.memory.engines.toy_engine import CheapTokens, ToyEngine, plain, recitation
from tests.memory.servers import Valkey, wait_for
from tests.strategies.fakes import own_records

RNG = np.random.default_rng(3)
TEXT = RNG.integers(0, 900, 60).tolist()
OTHER = RNG.integers(0, 900, 60).tolist()
MODEL = recitation(TEXT, OTHER)
FINGERPRINT = "0123456789abcdef"


@contextmanager
def engine(
    store: str | None = None, tenant: str = "", chunk: int = 1000, settings: MemorySettings | None = None
) -> Iterator[ToyEngine]:
    made = ToyEngine(MODEL, chunk, tenant)
    memory = Memory(None if store is None else RedisClient(store), FINGERPRINT)
    settings = settings or MemorySettings(strategy="trie")
    host = Host(Verifies.CHAINS, 8, lambda request_id: request_id in made.requests, CheapTokens)
    made.drafts = EngineDrafts(memory, settings, SettingsPolicy(settings, tenant), 1000, host)
    made.drafts.start()
    try:
        yield made
    finally:
        made.drafts.close()


def drafted(made: ToyEngine, request_id: str, prompt: list[int], most: int = 24, **options: Any) -> int:
    """Runs a request alone, once its tenant's memory is there, and checks its answer; returns how many tokens were
    drafted for it."""
    if isinstance(tenant := options.get("draftwood_tenant", made.tenant), str) and tenant:
        with suppress(LookupError):
            made.drafts.memory.strategy(tenant, options.get("draftwood_strategy", "trie"))
    made.add(request_id, prompt, most, **options)
    made.run()
    assert made.finished[request_id].output[:most] == plain(MODEL, prompt, most)
    return made.finished[request_id].drafted


def accepted(made: ToyEngine, request_id: str, prompt: list[int], **options: Any) -> int:
    """As `drafted`, but how many of these tokens were right: none where the text is not known. Those that a request
    guesses by its own text alone (`trie.weights.NOVEL`) are wrong, as no token comes twice in it."""
    drafted(made, request_id, prompt, **options)
    return made.finished[request_id].accepted


def rested(made: ToyEngine) -> None:
    """Until the engine's last requests have ended, and are learned: the other thread ends each with the lock."""

    def ended() -> bool:
        with made.drafts._exclusion.held():
            return not made.drafts.sessions

    wait_for(ended, "requests to end")


def test_the_start_leaves_no_trace_of_its_warm_up() -> None:
    with engine(tenant="acme") as made:
        assert made.drafts.sessions == {}
        assert made.drafts.failures == {}
        assert (made.drafts.memory.counters().tenants, made.drafts.memory.counters().learned) == (0, 0)


def test_an_answer_that_ends_before_its_memory_is_there_is_learned() -> None:
    with engine(tenant="acme") as made:
        memory, strategy = made.drafts.memory, made.drafts.memory.strategy("acme", "trie")
        late: list[Callable[[Strategy], object]] = []
        memory.fetch = lambda use, on_loaded: late.append(on_loaded)  # type: ignore[method-assign]
        made.add("1", TEXT[:4])
        made.run()
        assert made.finished["1"].drafted == 0
        rested(made)
        assert memory.counters().learned == 1
        for later in late:
            later(strategy)  # it is there now, and begins nothing for a request that has ended
        del memory.fetch
        made.drafts.step([])
        assert made.drafts.sessions == {}
        assert drafted(made, "2", TEXT[:4]) > 10
        assert strategy.tokens < 60  # type: ignore[attr-defined]  # it learned each answer once


@pytest.mark.parametrize("failed", ["", "it raised"])
def test_an_answer_is_drafted_for_by_its_memory_once_that_is_there(failed: str) -> None:
    """A request that began without it goes on with it, unless its drafter failed, and is learned once."""
    with engine(tenant="acme") as made:
        drafted(made, "1", TEXT[:4])
        rested(made)
        memory = made.drafts.memory
        loaded: Any = memory.strategy("acme", "trie")
        late: list[Callable[[Strategy], object]] = []
        unloaded = create("trie")

        def fetch(use: StrategyUse, on_loaded: Callable[[Strategy], object]) -> Strategy:
            late.append(on_loaded)
            return unloaded

        memory.fetch = fetch  # type: ignore[method-assign]
        made.add("2", TEXT[:4])
        for _ in range(4):
            made.step()
        assert made.requests["2"].accepted == 0
        [session] = made.drafts.sessions.values()
        session.stats.drafting_disabled_reason = failed
        late[0](loaded)
        steps = made.steps
        made.run()
        assert made.finished["2"].output[:24] == plain(MODEL, TEXT[:4], 24)
        assert (made.steps - steps < 10) is not bool(failed)
        rested(made)
        made.drafts.step([])  # what other drafters wrote is learned between two steps
        assert (memory.counters().learned, loaded.tokens) == (2, 2 * len(made.finished["2"].output))


def test_a_tenants_answers_are_drafted_for_its_next_request_and_for_no_other() -> None:
    with engine() as made:
        assert accepted(made, "1", TEXT[:4], draftwood_tenant="acme") == 0
        steps = made.steps
        assert drafted(made, "2", TEXT[:4], draftwood_tenant="acme") > 10
        assert made.steps - steps < 12
        assert accepted(made, "3", TEXT[:4], draftwood_tenant="other") == 0
        assert accepted(made, "4", TEXT[:4]) == 0  # without a tenant nothing is shared
        assert accepted(made, "5", TEXT[:4]) == 0
        rested(made)
        assert made.drafts.memory.counters().learned == 3


def test_without_a_tenant_a_request_drafts_from_its_own_prompt() -> None:
    with engine() as made:
        assert accepted(made, "1", TEXT[:4]) == 0
        assert drafted(made, "2", [*TEXT[:40], 999, *TEXT[:4]]) > 10
        assert drafted(made, "3", [*TEXT[:40], 999, *TEXT[:4]], draftwood_strategy="hybrid") > 10


def test_options_of_a_request() -> None:
    with engine(tenant="acme") as made:
        assert accepted(made, "1", TEXT[:4], draftwood_learn=0) == 0
        assert accepted(made, "2", TEXT[:4]) == 0  # nothing was learned
        assert drafted(made, "3", TEXT[:4], draftwood="off") == 0
        assert drafted(made, "4", TEXT[:4], draftwood_max_nodes=0) == 0
        assert drafted(made, "5", TEXT[:4], draftwood_strategy="none") == 0
        narrow, wide = (drafted(made, f"6{n}", TEXT[:4], draftwood_max_nodes=n) for n in ("1", 48))
        assert 0 < narrow <= made.finished["61"].most
        assert wide > 10
        assert drafted(made, "7", TEXT[:4], draftwood_learn="false") > 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draftwood": "maybe"}, "draftwood: 'maybe' is not allowed; it must be on or off, true or false, 1 or 0"),
        ({"draftwood_learn": "2"}, "draftwood_learn: '2' is not allowed; it must be on or off, true or false, 1 or 0"),
        ({"draftwood_max_nodes": "-1"}, "drafting.max_nodes: -1 is not allowed; it must be at least 0"),
        ({"draftwood_tenant": 7}, "draftwood_tenant: must be empty, or 1 to 128 letters"),
        ({"draftwood_tenant": "a/b"}, "draftwood_tenant: must be empty, or 1 to 128 letters"),
        ({"draftwood_session": "a\nb"}, "draftwood_session: must be text of at most 256 bytes"),
        ({"draftwood_strategy": "tire"}, "drafting.strategy: 'tire' is not allowed; it must be one of"),
    ],
)
def test_a_wrong_option_costs_the_drafts(
    options: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(tenant="acme") as made, caplog.at_level(logging.WARNING):
        for number in range(3):
            assert drafted(made, str(number), TEXT[:4], **options) == 0
        logged = [record.getMessage() for record in own_records(caplog)]
        assert [message in one for one in logged] == [True]
        rested(made)
        assert made.drafts.memory.counters().learned == 0


def test_whatever_the_engine_does_with_requests_the_answers_are_the_models() -> None:
    """Requests that join, move to other rows, are read in chunks, preempted, resumed, taken back and aborted."""
    random = np.random.default_rng(5)
    with engine(chunk=5) as made:
        made.order = lambda running: [running[i] for i in random.permutation(len(running))]
        prompts: dict[str, list[int]] = {}
        while len(prompts) < 150 or made.requests:
            if len(prompts) < 150 and len(made.requests) < 12:
                name, text = str(len(prompts)), (TEXT, OTHER)[random.integers(2)]
                at = int(random.integers(30))
                prompts[name] = text[at : at + int(random.integers(3, 20))]
                tenant = {"draftwood_tenant": "ab"[random.integers(2)]} if random.random() < 0.8 else {}
                made.add(name, prompts[name], int(random.integers(1, 40)), **tenant)
            for one in [*made.requests.values()]:
                if random.random() < 0.03:
                    made.abort(one.request_id)
                elif random.random() < 0.1:
                    one.paused, one.draft = not one.paused, []
                elif random.random() < 0.05 and len(one.output) > 2:
                    del one.tokens[one.prompt + 1 :]
                    one.draft = []
            made.step()
        assert len(made.finished) > 50
        for name, one in made.finished.items():
            assert one.output[: one.most] == plain(MODEL, prompts[name], one.most), name
        assert sum(one.drafted for one in made.finished.values()) > 500
        rested(made)
        assert all(resident.pins == 0 for resident in made.drafts.memory.residents.all())


def test_replicas_share_through_a_store_and_a_restart_keeps_it(server: Valkey) -> None:
    with engine(server.url) as first, engine(server.url) as second:
        assert accepted(first, "1", TEXT[:4], draftwood_tenant="acme") == 0
        rested(first)  # although no further step comes
        wait_for(lambda: first.drafts.memory.counters().outbox_records == 0, "the outbox to be sent")
        drafted(second, "1", TEXT[:4], draftwood_tenant="acme")  # may begin before its memory is there
        wait_for(lambda: second.drafts.memory.counters().tokens > 0, "the memory to be loaded")
        assert drafted(second, "2", TEXT[:4], draftwood_tenant="acme") > 10
        assert accepted(second, "9", TEXT[:4], draftwood_tenant="other") == 0
    with engine(server.url) as third:
        third.drafts.memory.strategy("acme", "trie")
        assert drafted(third, "1", TEXT[:4], draftwood_tenant="acme") > 10


def test_a_store_that_is_down_delays_nothing(store_is_down: str) -> None:
    with engine(store_is_down) as made:
        drafted(made, "1", TEXT[:4], draftwood_tenant="acme")  # completes, whether or not it waited for its memory
        wait_for(lambda: not made.drafts.memory.healthy, "the store to be missed")
        drafted(made, "2", TEXT[:4], draftwood_tenant="acme")
        began = time.monotonic()
        assert drafted(made, "3", TEXT[:4], draftwood_tenant="acme") > 10
        assert time.monotonic() - began < 2.0


def test_a_step_that_raises_costs_its_drafts_and_after_three_in_a_row_they_pause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    raised = 0

    def broken() -> list[Row]:
        nonlocal raised
        raised += 1
        raise RuntimeError("broken")

    with engine(tenant="acme") as made:
        for _ in range(2):
            for _ in range(MAX_FAILURES - 1):
                assert made.drafts.attempt(broken) is None
            assert made.drafts.failing
            assert made.drafts.attempt(list) is not None
            assert not made.drafts.failing
        for _ in range(MAX_FAILURES + 5):
            assert made.drafts.attempt(broken) is None
        assert raised == 2 * (MAX_FAILURES - 1) + MAX_FAILURES
        assert made.drafts.attempt(list) is None
        assert caplog.text.count("nothing is drafted for 60 s, since 3 steps in a row failed") == 1
        assert made.drafts.failing
        made.drafts._paused_until -= PAUSE_SECONDS
        assert made.drafts.attempt(list) is not None
        assert not made.drafts.failing


def test_every_strategy_is_compiled_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed = []

    def warm_up(name: str) -> None:
        warmed.append(name)
        if name == "jacobi":
            raise RuntimeError("a strategy of another package may fail")

    monkeypatch.setattr("draftwood_memory.engines.drafts.warm_up", warm_up)
    with engine(tenant="acme") as made:
        assert sorted(warmed) == strategy_names()
        assert drafted(made, "1", [*TEXT[:40], 999, *TEXT[:4]]) > 10


@pytest.mark.parametrize("chunk", [5_000, 100_000], ids=["chunks", "at once"])
@pytest.mark.parametrize("strategy", ["trie", "hybrid", "jacobi"])
def test_a_long_prompt_is_indexed_when_its_first_token_is_written(strategy: str, chunk: int) -> None:
    with engine(chunk=chunk) as made:
        prompt = [*np.random.default_rng(1).integers(0, 900, 25_000).tolist(), 998, *TEXT, 999, *TEXT[:4]]
        made.add("1", prompt, 30, draftwood_strategy=strategy)
        for _ in range(-(-len(prompt) // chunk)):
            made.step()
        assert len(made.requests["1"].output) == 1
        [session] = made.drafts.sessions.values()
        assert session.stats.proposed_tokens > 0
        made.run()
        assert made.finished["1"].output[:30] == plain(MODEL, TEXT[:4], 30)


@pytest.mark.parametrize("tenant", ["", "acme"])
def test_a_request_that_ends_in_its_prompt_leaves_nothing(tenant: str) -> None:
    with engine(tenant=tenant, chunk=10) as made:
        made.add("1", TEXT[:40])
        made.step()
        assert [*made.drafts.sessions] == ["1"]
        made.abort("1")
        made.drafts.step([])
        assert made.drafts.sessions == {}
        assert made.drafts.memory.counters().learned == 0
        assert not any(value for metric, _, value in made.drafts.points() if metric.name == "draftwood_sequences")
        assert all(resident.pins == 0 for resident in made.drafts.memory.residents.all())


def test_a_strategy_that_hangs_costs_its_drafts_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from draftwood_strategies import TrieStrategy

    with engine(tenant="acme") as made:
        assert "cannot be interrupted" not in caplog.text
        monkeypatch.setattr(timed_calls, "CALL_LIMIT", 1.0)
        monkeypatch.setattr(timed_calls, "FIRST_CALL_LIMIT", 1.0)
        monkeypatch.setattr(TrieStrategy, "propose_all", lambda *_: threading.Event().wait())
        assert accepted(made, "1", TEXT[:4]) == 0
    assert "propose raised CallTimeoutError: no answer within 1 s" in caplog.text
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_a_strategy_that_hangs_aside_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A request's end is told to its strategy on another thread, where nothing can be interrupted."""
    hangs, goes_on = threading.Event(), threading.Event()

    def hang(*_: Any) -> None:
        hangs.set()
        goes_on.wait(60.0)

    with engine(tenant="acme") as made:
        monkeypatch.setattr(GuardedDrafter, "close", hang)
        drafted(made, "1", TEXT[:4])
        assert hangs.wait(30.0)
        monkeypatch.setattr(exclusion, "STEP_WAIT", 1.0)
        began = time.monotonic()
        for _ in range(3 * MAX_FAILURES):
            assert made.drafts.attempt(list) is None
            assert made.drafts.failing
        assert time.monotonic() - began < 3 * MAX_FAILURES * exclusion.STEP_WAIT  # it waits once
        assert caplog.text.count("does not return to the other thread") == 1
        goes_on.set()
        wait_for(lambda: made.drafts.attempt(list) is not None, "the engine to draft again")


def test_an_engine_that_steps_on_another_thread_says_that_nothing_is_interrupted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with engine(tenant="acme") as made:
        for _ in range(2):
            stepping = threading.Thread(target=drafted, args=(made, "1", TEXT[:4]))
            stepping.start()
            stepping.join()
    assert caplog.text.count("cannot be interrupted: it does not step on the main thread") == 1
