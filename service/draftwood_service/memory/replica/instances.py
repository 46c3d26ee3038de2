"""Strategy instances of a memory: created, fed with learned sequences, rebuilt from the log."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from draftwood_service.memory.config import Capacity
from draftwood_service.memory.replica.outbox import Outbox
from draftwood_strategies import Strategy, create
from draftwood_strategies.draft import Int32Array
from draftwood_strategies.options import Options
from draftwood_strategies.registry import options_of

if TYPE_CHECKING:
    from draftwood_service.memory.replica.residents import Resident

_log = structlog.get_logger(__name__)


class InstanceKey(NamedTuple):
    """A strategy and its options: requests with the same ones share an instance."""

    name: str
    options: Options = ()


def make(key: InstanceKey, capacity: Capacity) -> Strategy:
    """A new instance with at most the memory's capacity, if the strategy has one.

    Raises:
        UnknownStrategyError: no strategy has this name.
        ValueError, TypeError: it does not accept the options.
    """
    options = dict(key.options)
    if "capacity_tokens" in options_of(key.name, options):
        most = min(capacity.tokens, capacity.bytes // 4)
        options["capacity_tokens"] = min(int(options.get("capacity_tokens", most)), most)
    return create(key.name, **options)


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


def rebuild(resident: Resident, outbox: Outbox, keys: list[InstanceKey], replace_empty: bool = False) -> None:
    """Replaces instances by new ones that have learned the log and the records that the store does not have yet.

    Args:
        replace_empty: replace also if there is nothing to learn.
    """
    with resident.lock:
        resident.learned_meanwhile = []
        unstored = outbox.records(resident.name, resident.log.marks.get(outbox.source, 0))
    oldest = resident.config.oldest(time.time())
    records = [record for record in (*resident.log, *unstored) if record.learned_at >= oldest]
    built = {}
    if records or replace_empty:
        for key in keys:
            built[key] = make(key, resident.capacity)
            learn(built[key], (record.tokens for record in records))
    with resident.lock:
        for strategy in built.values():
            learn(strategy, resident.learned_meanwhile or ())
        resident.learned_meanwhile = None
        resident.strategies.update({key: strategy for key, strategy in built.items() if key in resident.strategies})
        waiting = [resident.unbuilt.pop(key) for key in keys if key in resident.unbuilt]
    for future in waiting:
        future.set_result(None)
