"""Tasks end even if they miss a cancellation."""

from __future__ import annotations

import asyncio

import pytest

from draftwood_tenants.resources import ending


async def test_a_task_that_misses_a_cancellation_ends_at_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "_AGAIN_SECONDS", 0.01)
    missed = 0

    async def deaf() -> None:
        nonlocal missed
        while missed < 2:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                missed += 1

    tasks = [asyncio.create_task(deaf()), asyncio.create_task(asyncio.sleep(60)), None]
    await asyncio.sleep(0)
    await asyncio.wait_for(ending.end(tasks), 5)
    assert missed == 2
    assert all(task.done() for task in tasks if task is not None)
