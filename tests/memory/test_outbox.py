"""The outbox: what waits for the store is bounded, the oldest goes first, and nobody else's does."""

from __future__ import annotations

import time

from draftwood_memory import MemoryName
from draftwood_memory.local.outbox import Outbox, PendingRecord
from draftwood_memory.local.record_log import LoggedRecord
from draftwood_memory.records import Kind, Record
from tests.memory.helpers import numbers, tokens_of


def record(tenant: str, count: int, *, generation: int = 0, age: float = 0.0) -> PendingRecord:
    """Of so many tokens."""
    learned = time.monotonic() - age
    held = LoggedRecord(Record(Kind.OUTPUT, tokens_of(*numbers(count)), 1))
    return PendingRecord(MemoryName(tenant), generation, learned, learned, held)


def outbox_of(*records: PendingRecord, max_tokens: int) -> Outbox:
    outbox = Outbox(max_tokens, max_seconds=60.0)
    for one in records:
        outbox.add(one)
    return outbox


def test_what_could_not_be_sent_waits_again_in_its_order_and_the_oldest_are_dropped() -> None:
    a, b, c, d = (record(tenant, 4) for tenant in "abcd")
    outbox = outbox_of(a, b, c, max_tokens=12)
    assert (outbox.take(5), outbox.pending) == ([a, b], 3)
    outbox.add(d)  # what was taken counts no more
    outbox.requeue([b])
    assert (outbox.pending, outbox.dropped) == (3, 0)
    assert outbox.take(1) == [b]  # one at least
    assert outbox.names() == {one.name for one in (b, c, d)}
    outbox.add(a)
    outbox.requeue([b])
    assert (outbox.take(4), outbox.dropped) == ([c], 1)
    outbox.requeue([])
    assert outbox.take(100) == [d, a]


def test_records_that_waited_for_too_long_are_not_sent() -> None:
    old, new = record("a", 4, age=61.0), record("a", 4, age=59.0)
    outbox = outbox_of(old, new, max_tokens=8)
    assert (outbox.take(1), outbox.pending, outbox.dropped) == ([new], 1, 1)


def test_stale_records_of_a_memory_are_discarded_and_no_others() -> None:
    stale, current, other = record("a", 4), record("a", 4, generation=1), record("b", 4)
    outbox = outbox_of(stale, current, other, max_tokens=12)
    assert outbox.discard(MemoryName("a"), lambda one: one.generation == 0) == 1
    outbox.add(later := record("a", 4))  # there is room for it
    assert (outbox.of(MemoryName("a")), outbox.of(MemoryName("b"))) == ([current, later], [other])
    assert (outbox.pending, outbox.dropped) == (3, 0)
