"""Strategy instances of a memory: created, fed with learned sequences, rebuilt from the log."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import structlog

from service.memory.config import Capacity
from service.memory.replica.outbox import Outbox
from strategies import Strategy, create
from strategies.draft import Int32Array

if TYPE_CHECKING:
    from service.memory.replica.residents import Resident

_log = structlog.get_logger(__name__)


def make(name: str, capacity: Capacity) -> Strategy:
    """A new instance with the memory's capacity, if the strategy has one. Raises UnknownStrategyError."""
    try:
        return create(name, capacity_tokens=min(capacity.tokens, capacity.bytes // 4))
    except TypeError:
        return create(name)


def learn(strategy: Strategy, sequences: Iterable[Int32Array]) -> None:
    """Lets a strategy learn whole sequences, int32[n] each, if it can. A failure is logged and affects nothing else."""
    learn_one: Any = getattr(strategy, "learn", None)
    if learn_one is None:
        return
    try:
        for tokens in sequences:
            learn_one(tokens)
    except Exception:
        _log.exception("strategy cannot learn", strategy=type(strategy).__name__)


def rebuild(resident: Resident, outbox: Outbox, names: list[str], replace_empty: bool = False) -> None:
    """Replaces instances by new ones that have learned the log and the records that the store does not have yet.

    Args:
        replace_empty: replace also if there is nothing to learn.
    """
    with resident.lock:
        resident.learned_meanwhile = []
        unstored = outbox.records(resident.name, resident.log.marks.get(outbox.source, 0))
    records = [*resident.log, *unstored]
    built = {}
    if records or replace_empty:
        for name in names:
            built[name] = make(name, resident.capacity)
            learn(built[name], (record.tokens for record in records))
    with resident.lock:
        for strategy in built.values():
            learn(strategy, resident.learned_meanwhile or ())
        resident.learned_meanwhile = None
        resident.strategies.update(built)
        waiting = [resident.unbuilt.pop(name) for name in names if name in resident.unbuilt]
    for future in waiting:
        future.set_result(None)
