"""Which memories of a process are evicted: none that is in use, nor one that the store cannot give back."""

from __future__ import annotations

import time
from concurrent.futures import Future

import pytest

from draftwood_memory import MemoryConfig, MemoryName, StrategyKey
from draftwood_memory.local.record_log import LoggedRecord
from draftwood_memory.local.resident import Resident
from draftwood_memory.local.residents import Residents
from draftwood_memory.records import Kind, Record
from draftwood_memory.store.clock import StoreClock
from draftwood_memory.store.naming import Naming
from tests.memory.helpers import FINGERPRINT, numbers, tokens_of

T = MemoryName("t")


def opened(config: MemoryConfig, stored: bool = True) -> tuple[Residents, Resident]:
    """With one memory, which was loaded and used 10 s ago."""
    residents = Residents(Naming(FINGERPRINT), config, StoreClock(), stored)
    resident = residents.open(T)
    resident.loaded = True
    resident.used_at = time.monotonic() - 10.0
    return residents, resident


@pytest.mark.parametrize(
    ("case", "evicted"),
    [
        ("idle", True),
        ("used lately", False),
        ("pinned", False),
        ("unpinned again", True),
        ("not loaded yet", False),
        ("strategies without the records", False),
        ("records that the store lacks", False),
        ("no store", False),
    ],
)
def test_an_idle_memory_is_evicted_if_the_store_can_give_it_back(case: str, evicted: bool) -> None:
    config = MemoryConfig(idle_seconds=60.0 if case == "used lately" else 9.0)
    residents, resident = opened(config, stored=case != "no store")
    if "pinned" in case:
        residents.pin(T)
    if case == "unpinned again":
        residents.unpin(resident)
    resident.used_at -= 10.0
    resident.loaded = case != "not loaded yet"
    if case == "strategies without the records":
        resident.unbuilt[StrategyKey("trie")] = Future()
    residents.evict(frozenset({T}) if case == "records that the store lacks" else frozenset())
    assert (T not in residents, residents.evicted) == (evicted, int(evicted))


@pytest.mark.parametrize(("waited", "kept"), [(0.5, True), (2.0, False)])
def test_of_too_many_one_that_a_request_waits_for_stays_for_a_moment(waited: float, kept: bool) -> None:
    residents, resident = opened(MemoryConfig(max_resident=1))
    resident.unbuilt[StrategyKey("trie")] = Future()
    resident.used_at = time.monotonic() - waited
    assert not residents.too_many
    residents.open(MemoryName("t", "x/a"))
    assert residents.too_many
    residents.evict(frozenset())
    assert (T in residents) == kept


def test_the_memory_that_was_used_last_stays_even_if_it_is_too_large() -> None:
    residents, _ = opened(MemoryConfig(max_bytes=1))
    residents.open(MemoryName("t", "x/a"))
    last = residents.open(MemoryName("t", "x/b"))
    for resident in residents.all():
        resident.add(LoggedRecord(Record(Kind.OUTPUT, tokens_of(*numbers(9)), 1)))
    residents.evict(frozenset())
    assert residents.all() == [last]


def test_an_instance_that_is_dropped_before_it_was_built_lets_its_request_begin_and_does_not_come_back() -> None:
    _, resident = opened(MemoryConfig())
    keys = [StrategyKey("trie", (("branch_length", length),)) for length in range(1, 10)]
    waiting = [resident.instance(key)[1] for key in keys]
    assert [one is None or one.done() for one in waiting] == [True] + [False] * 8
    resident.build(keys, replace_empty=True)
    assert ([*resident.strategies], resident.unbuilt) == (keys[1:], {})
