"""A call into a strategy that does not return is interrupted, whatever Python it is in."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from draftwood_strategies.draft_engine import guard as timed_calls
from draftwood_strategies.draft_engine.watchdog import CallTimeoutError, Watchdog
from tests.strategies.draft_engine.test_guard import NOTHING, LoneDrafter
from tests.strategies.fakes import FakeStrategy


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    before = signal.getsignal(signal.SIGUSR1)
    watchdog = Watchdog()
    yield watchdog
    watchdog.close()
    watchdog.close()
    assert signal.getsignal(signal.SIGUSR1) == before


def spin() -> None:
    while True:
        pass


def swallow() -> None:
    while True:
        try:
            spin()
        except Exception:
            continue


@pytest.mark.parametrize("endless", [spin, swallow, lambda: threading.Event().wait(), lambda: time.sleep(1e6)])
def test_what_does_not_return_is_interrupted(watchdog: Watchdog, endless: Callable[[], None]) -> None:
    for _ in range(2):
        with pytest.raises(CallTimeoutError, match=r"within 0\.1 s"):
            watchdog.call(0.1, endless)
    assert watchdog.call(60.0, lambda: 5) == 5


def test_nothing_is_sent_once_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that is sent late would meet the default handler, which ends the process."""
    sent: list[bool] = []
    begun, closed, ended = threading.Event(), threading.Event(), threading.Event()

    def slowly(owner: int, number: int) -> None:
        begun.set()
        closed.wait(0.3)
        sent.append(closed.is_set())
        ended.set()

    monkeypatch.setattr(signal, "pthread_kill", slowly)
    watchdog = Watchdog()
    watchdog.call(0.0, begun.wait, 20.0)  # it is just about to be interrupted when it returns
    watchdog.close()
    closed.set()
    assert ended.wait(20.0)
    assert sent == [False]


def test_what_is_raised_comes_through_and_nothing_is_interrupted_afterwards(watchdog: Watchdog) -> None:
    with pytest.raises(ZeroDivisionError):
        watchdog.call(0.3, lambda: 1 / 0)
    time.sleep(0.8)  # longer than the limit of the call that is over, and several looks of the watchdog


def test_on_another_thread_calls_have_no_limit() -> None:
    found: list[int] = []

    def slow() -> int:
        time.sleep(0.5)
        return 3

    def run() -> None:
        found.append(Watchdog().call(0.01, slow))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [3]


@pytest.mark.parametrize("call", ["start", "propose", "observe", "close"])
def test_a_drafter_that_hangs_is_switched_off(watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setattr(timed_calls, "CALL_LIMIT", 0.5)
    monkeypatch.setattr(timed_calls, "FIRST_CALL_LIMIT", 0.5)
    plugin = FakeStrategy()
    setattr(plugin, call, lambda *_: spin())
    drafter = LoneDrafter(plugin, watchdog=watchdog)
    for _ in range(2):
        drafter.propose(4)
        drafter.observe([7], NOTHING)
    drafter.close()
    assert drafter.failures == {"theirs": 1}
    assert f"{call} raised CallTimeoutError" in drafter.stats.drafting_disabled_reason
