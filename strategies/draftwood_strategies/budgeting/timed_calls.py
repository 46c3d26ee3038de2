"""Calls into strategies: timed, charged to the sequences that they are for, and interrupted if they do not return."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol

from draftwood_strategies.budgeting.draft_account import DraftAccount, charge_all, is_first_call, overdrawn, rows_of
from draftwood_strategies.budgeting.watchdog import Watchdog

CALL_LIMIT, FIRST_CALL_LIMIT = 5.0, 120.0
"""Seconds after which a call into a strategy is interrupted; the first one of a class may compile."""


class ExitedError(Exception):
    """A strategy raised what would have ended this process, such as SystemExit."""


class Called(Protocol):
    """The drafter of one sequence, see `GuardedDrafter`."""

    account: DraftAccount
    watchdog: Watchdog | None

    def failed(self, method: str, error: Exception) -> None:
        """A call raised this."""

    def add_seconds(self, seconds: float) -> None:
        """A call took so long for it."""

    def limit_cost(self) -> None:
        """Calls took more time than they may."""


class TimedCalls:
    """Calls for these drafters."""

    def __init__(self, drafters: SequenceOf[Called]) -> None:
        self._drafters = drafters
        self._accounts = rows_of([one.account for one in drafters])

    def failed(self, i: int, method: str, error: Exception) -> None:
        self._drafters[i].failed(method, error)

    def timed(self, sequences: SequenceOf[int], owner: object, function: Callable[..., Any], *args: Any) -> Any:
        """What `function`, a method of `owner`, returns; its time is charged, whether it returns or raises."""
        whole = len(sequences) == len(self._drafters)
        drafters = self._drafters if whole else [self._drafters[i] for i in sequences]
        accounts = self._accounts if whole else self._accounts[[*sequences]]
        first = is_first_call(owner, function.__name__)
        started = time.perf_counter()
        try:
            return limited(drafters[0].watchdog, first, function, *args)
        finally:
            share = (time.perf_counter() - started) / len(drafters)
            for one in drafters:
                one.add_seconds(share)
            if not first:
                charge_all(accounts, share)

    def limit_costs(self) -> None:
        """Lets the drafters that took too much time do without a part, pause or end."""
        for i in overdrawn(self._accounts):
            self._drafters[i].limit_cost()


def limited(watchdog: Watchdog | None, first: bool, function: Callable[..., Any], *args: Any) -> Any:
    """What a call returns; it is interrupted if it takes too long.

    Raises:
        Exception: whatever it raises; `ExitedError` in place of what would end this process.
    """
    try:
        if watchdog is None:
            return function(*args)
        return watchdog.call(FIRST_CALL_LIMIT if first else CALL_LIMIT, function, *args)
    except (SystemExit, GeneratorExit, asyncio.CancelledError) as error:
        raise ExitedError(f"{type(error).__name__}: {error}") from error
