"""What the memory counts, for telemetry and for operators."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class MemoryCounters:
    """Written by the memory's own thread but for `learned` and `dropped`; read from any.

    Attributes:
        tenants, tokens, index_bytes: memories in this process, what their logs hold, and their indexes' bytes.
        outbox_records: records that the store has not confirmed.
        retained_records: confirmed ones that are kept for a store that loses them.
        learned, pushed, received: records taken from requests, confirmed by the store, taken from other processes.
        dropped: records that were lost: the outbox was full, or they were too old.
        stale: records that a purge came before.
        unreadable: values that could not be read: corrupt, of a newer version, encrypted with an unknown key.
        polls: rounds with the store.
        failures: rounds that failed.
        reconnects: rounds that succeeded after one that failed.
        reloads: memories built anew, since the store and this process had come apart.
        folds: snapshots written.
        seeds: memories that a store which had lost them got back from this process.
        purges: memories emptied here because somebody purged them.
        last_lag: seconds from a record's end to its confirmation, of the latest one.
        last_contact: when the store answered last, on the clock of `time.monotonic`; 0 for never.
        oldest_snapshot_age: seconds, of the memories in this process; 0 without snapshots.
    """

    tenants: int = 0
    tokens: int = 0
    index_bytes: int = 0
    outbox_records: int = 0
    retained_records: int = 0
    learned: int = 0
    pushed: int = 0
    received: int = 0
    dropped: int = 0
    stale: int = 0
    unreadable: int = 0
    polls: int = 0
    failures: int = 0
    reconnects: int = 0
    reloads: int = 0
    folds: int = 0
    seeds: int = 0
    purges: int = 0
    last_lag: float = 0.0
    last_contact: float = 0.0
    oldest_snapshot_age: float = 0.0
