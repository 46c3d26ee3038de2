"""What the scheduler takes of a decoding step, with more tenants than slots, so that they take turns."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from draftwood_model_runner.request import Request, StopParams
from draftwood_model_runner.scheduling.kv_pool import KVPool
from draftwood_model_runner.scheduling.scheduler import Scheduler
from draftwood_model_runner.sequence import Sequence

SLOTS, WAITING_TENANTS = (8, 64, 256), (64, 256, 1000)
_TARGET_MS = 0.2
"""With 64 slots and 1,000 waiting tenants."""
_PROMPT_TOKENS, _ANSWER_TOKENS = 64, 100_000
_PAGE_SIZE = 16
_PAGES_OF_SLOT = 256
_CHUNK = 512


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """Of the measured steps, in all of which all slots decode.

    Attributes:
        schedule_ms: milliseconds of `Scheduler.schedule`, the median over the steps.
        mean_ms: their mean, with the steps in which tenants change places.
    """

    slots: int
    waiting_tenants: int
    schedule_ms: float
    mean_ms: float


def measured_schedule(slots: int, waiting_tenants: int, steps: int) -> ScheduleRow:
    """As many tenants as slots run, one sequence each, and others wait, one sequence each; all of equal weight."""
    tenants = slots + waiting_tenants
    scheduler = Scheduler(KVPool(slots * _PAGES_OF_SLOT, _PAGE_SIZE), slots, _CHUNK, _CHUNK)
    for number in range(tenants):
        prompt = np.full(_PROMPT_TOKENS, number, np.int32)
        stop = StopParams(_ANSWER_TOKENS)
        scheduler.add(Sequence(Request(request_id=str(number), prompt=prompt, stop=stop, tenant=str(number))))
    while any(sequence.committed < _PROMPT_TOKENS for sequence in scheduler.running) or not scheduler.running:
        _step(scheduler)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        seconds = [_step(scheduler) for _ in range(steps)]
    finally:
        gc.enable()
        gc.unfreeze()
    return ScheduleRow(
        slots,
        waiting_tenants,
        round(1e3 * statistics.median(seconds), 4),
        round(1e3 * statistics.fmean(seconds), 4),
    )


def _step(scheduler: Scheduler) -> float:
    """A step of an engine that writes one token for each sequence that decodes; seconds of its scheduling."""
    began = time.perf_counter()
    plan = scheduler.schedule()
    taken = time.perf_counter() - began
    for sequence, tokens in plan.scheduled:
        sequence.committed += tokens
        if sequence.committed == sequence.length:
            sequence.output.append(1)
    return taken


def schedule_table(rows: list[ScheduleRow], title: str) -> Table:
    table = Table("slots", "waiting tenants", "ms a step", "target", "mean ms", title=title, title_justify="left")
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        target = f"< {_TARGET_MS}" if (row.slots, row.waiting_tenants) == (64, 1000) else ""
        cells = str(row.slots), str(row.waiting_tenants), f"{row.schedule_ms:.3f}", target, f"{row.mean_ms:.3f}"
        table.add_row(*cells)
    return table


def draw_schedule(axes: Any, rows: list[ScheduleRow]) -> None:
    for slots in sorted({row.slots for row in rows}):
        own = [row for row in rows if row.slots == slots]
        axes.plot([row.waiting_tenants for row in own], [row.schedule_ms for row in own], "o-", label=f"{slots} slots")
    axes.set_xlabel("waiting tenants")
    axes.set_ylabel("milliseconds of scheduling a step")
    axes.legend()
