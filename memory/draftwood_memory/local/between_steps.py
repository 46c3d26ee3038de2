"""Lets strategies learn between two steps of the engine, on the thread that they belong to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeAlias

from draftwood_memory.local.resident import Resident, learn
from draftwood_memory.records import Int32Array, Record, batched
from draftwood_strategies import Strategy

_BATCH_TOKENS = 512
"""Tokens learned at once between two steps, in 1 ms (`draftwood bench memory`: 1.9 to 2.0 us a token)."""
_LEARN_SECONDS = 1.0
"""For the engine to learn one batch, before the next is queued. It only matters beside very long steps."""

RunOnEngine: TypeAlias = Callable[[Callable[[], None]], object]
"""Runs a task between two steps, on the thread that drafts. It may raise, once there are no more steps."""


class BetweenSteps:
    """The engine's thread, as far as strategies learn on it.

    Attributes:
        run_on_engine: at once, on the caller's thread, until the engine starts.
        on_learned: called on the memory thread when a memory's strategies have learned what `learn_later` was given.
    """

    def __init__(self) -> None:
        self.run_on_engine: RunOnEngine = lambda task: task()
        self.on_learned: Callable[[], None] = lambda: None

    def learn(self, strategies: SequenceOf[Strategy], sequences: list[Int32Array]) -> Future[None] | None:
        """Lets strategies learn sequences, int32[n] each.

        Returns:
            A future that completes then; None if the engine takes no more.
        """
        done: Future[None] = Future()

        def task() -> None:
            for strategy in strategies:
                learn(strategy, sequences)
            if not done.done():
                done.set_result(None)

        try:
            self.run_on_engine(task)
        except Exception:
            return None
        return done

    def learn_later(self, resident: Resident, records: SequenceOf[Record]) -> None:
        """Lets the published strategies of a memory learn records that its log has, a batch between two steps.

        On the memory thread, which goes on meanwhile: a large import takes as long as thousands of steps. A purge ends
        it.
        """
        if records:
            resident.to_learn.append(([*resident.strategies.values()], records))
        if resident.to_learn and not resident.learns:
            resident.learning = asyncio.create_task(self._learn_all(resident))

    async def learned(self, resident: Resident) -> None:
        """Waits for what `learn_later` was given. On the memory thread."""
        if resident.learning is not None:
            await asyncio.wait([resident.learning])

    async def _learn_all(self, resident: Resident) -> None:
        while resident.to_learn:
            await self._learn_next(resident)
        self.on_learned()

    async def _learn_next(self, resident: Resident) -> None:
        queue, before = resident.to_learn, None
        strategies, records = queue.popleft()
        for batch in batched(records, _BATCH_TOKENS) if strategies else ():
            if resident.to_learn is not queue:  # it was purged
                return
            if before is not None:
                with suppress(TimeoutError):  # a long step
                    await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(before)), _LEARN_SECONDS)
            before = self.learn(strategies, [record.tokens for record in batch])
            if before is None:
                return
