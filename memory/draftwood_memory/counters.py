"""Counters of the memories of this process, for operators."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class MemoryCounters:
    """Written by the memory thread, except `learned`, `late` and `dropped`; read from any thread.

    Attributes:
        tenants, tokens, index_bytes: memories in this process, tokens of their records, bytes of their indexes.
        resident_bytes: bytes of their records and indexes.
        evicted: memories that were evicted from this process.
        late: requests that began without their memory, since it took longer to load than they wait.
        outbox_records: records that the store has not confirmed.
        learned, pushed, received: records taken from requests, confirmed by the store, read from other processes.
        dropped: records that were lost: the outbox was full, or they were too old.
        stale: records dropped because of a purge after them.
        newer_memories: memories in this process that a newer version wrote to; they are read, never written.
        newer_records: records of this process that were not sent to such memories.
        unreadable: entries that could not be decoded: corrupt, of a newer version, encrypted with an unknown key.
        failures: calls to the store that failed, and rounds with it.
        reconnects: rounds that succeeded after a failed one.
        reloads: memories of which the store lost the latest entries, as in a failover.
        restored: memories that were written again to a store that had lost them.
        last_lag: seconds from the end of a request to the confirmation of its record, of the latest one.
    """

    tenants: int = 0
    tokens: int = 0
    index_bytes: int = 0
    resident_bytes: int = 0
    evicted: int = 0
    late: int = 0
    outbox_records: int = 0
    learned: int = 0
    pushed: int = 0
    received: int = 0
    dropped: int = 0
    stale: int = 0
    newer_memories: int = 0
    newer_records: int = 0
    unreadable: int = 0
    failures: int = 0
    reconnects: int = 0
    reloads: int = 0
    restored: int = 0
    last_lag: float = 0.0
