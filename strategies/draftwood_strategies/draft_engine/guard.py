"""The guard around strategies: their calls are timed, charged to the sequences that they are for, and interrupted if
they do not return; whatever a drafter does wrong ends drafting for its sequence alone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from draftwood_strategies import dispatch
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.base import (
    Composite,
    DeviceDrafter,
    Drafter,
    DraftsForRow,
    DraftStats,
    ModelAnswer,
    ModelAsk,
    PromptIndexer,
    SourceCounts,
    Strategy,
    SupportsReadOnly,
)
from draftwood_strategies.draft_engine.controller import (
    DraftAccount,
    DraftCostModel,
    charge_all,
    is_first_call,
    overdrawn,
    rows_of,
)
from draftwood_strategies.draft_engine.watchdog import Watchdog
from draftwood_strategies.drafting import Drafting
from draftwood_strategies.none import NoDrafts

CALL_LIMIT, FIRST_CALL_LIMIT = 5.0, 120.0
"""Seconds after which a call into a strategy is interrupted; the first one of a class may compile."""

_log = logging.getLogger(__name__)
MAX_INDEXED_TOKENS = 2048
"""Tokens of prompts that are indexed in one step, for which all its sequences wait: 0.2 to 0.7 ms, and 1.8 ms for
jacobi (docs/decisions/first-tokens.md)."""


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
        self._accounts = rows_of([drafter.account for drafter in drafters])

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
            for drafter in drafters:
                drafter.add_seconds(share)
            if not first:
                charge_all(accounts, share)

    def charge(self, seconds: float) -> None:
        """A model that was asked for all of them took so long for each."""
        for drafter in self._drafters:
            drafter.add_seconds(seconds)
        charge_all(self._accounts, seconds)

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


def draft_by_model(watchdog: Watchdog | None, ask: ModelAsk) -> ModelAnswer:
    """As `dispatch.draft_by_model`; the time of a first call does not count.

    Raises:
        Exception: as of `limited`.
    """
    first = is_first_call(ask.source, "draft")
    answer: ModelAnswer = limited(watchdog, first, dispatch.draft_by_model, ask)
    return answer._replace(seconds=0.0) if first else answer


@dataclass(slots=True)
class IndexingBudget:
    """How many tokens of prompts drafters may still index in a step."""

    left: int = MAX_INDEXED_TOKENS


class DraftedRequest(Protocol):
    """What drafting reads of a request, see `draftwood_model_runner.request.Request`."""

    @property
    def request_id(self) -> str: ...
    @property
    def prompt(self) -> Int32Array: ...
    @property
    def drafting(self) -> Drafting: ...
    @property
    def learns(self) -> bool: ...


class GuardedDrafter:
    """The drafter of one sequence: timed, its trees checked, suspended while it does not pay, switched off if it fails.

    The strategy starts it when the first draft is needed: nothing is drafted while prompts wait, and starting a drafter
    would delay them. A long prompt is indexed in pieces, over several steps, while the model reads it (`index_ahead`)
    or after that; nothing is drafted for its sequence before.

    Args:
        request: what is drafted for.
        strategy: the tenant's; None for no drafts.
        stats: take the time spent, the counts by source, and the reason why drafting was switched off.
        vocab_size: draft tokens are below it.
        failures: counts, by the name of the strategy, the sequences that it was switched off for.
        cost_model: what drafts of this tenant by the same strategy gain and cost; it is kept up to date.
        watchdog: interrupts calls that do not return; None for no limit.
        row: of the host, for drafters that ask (`DraftsForRow`).

    Attributes:
        account: what its calls cost and gained.
        drafting: it drafts in this step, and has not learned yet what came of it.
        strategy: None for one that never drafts.
        drafter: what it started; None before that, and once drafting is switched off.
    """

    def __init__(
        self,
        request: DraftedRequest,
        strategy: Strategy | None,
        stats: DraftStats,
        vocab_size: int,
        failures: Counter[str],
        cost_model: DraftCostModel,
        watchdog: Watchdog | None = None,
        row: object = None,
    ) -> None:
        self.account = DraftAccount(cost_model)
        self.stats = stats
        self._request = request
        self.vocab_size = vocab_size
        self._failures = failures
        self.watchdog = watchdog
        self._row = row
        self._unstarted = None if isinstance(strategy, NoDrafts) else strategy
        self.strategy = self._unstarted
        self.drafter: Drafter | None = None
        self._indexer: PromptIndexer | None = None
        self._on_device: DeviceDrafter | None = None
        self._to_index = int(request.prompt.shape[0])
        self._top_k = 0
        self._pause = 0
        self._paused = self.drafting = False
        self._composite, self._has_spare_part = False, True
        self._deferred: list[int] = []

    @property
    def active(self) -> bool:
        """It drafts, or will when it is asked."""
        return self.drafter is not None or self._unstarted is not None

    @property
    def pauses(self) -> bool:
        """It goes without drafts for some steps, since they do not pay."""
        return self._pause > 0

    @property
    def indexing(self) -> bool:
        """Its prompt is not indexed to the end."""
        return self._indexer is not None

    @property
    def on_device(self) -> DeviceDrafter | None:
        """The drafter, if its next draft can be made on a device, behind a step in flight."""
        drafter = self._on_device
        return drafter if drafter is not None and drafter.row is not None and self._indexer is None else None

    @property
    def follows(self) -> bool:
        """The next step needs nothing of it that waits for the step in flight."""
        return not self.active or self._pause > 0 or self.on_device is not None

    @property
    def expected(self) -> float:
        """How many tokens of the next draft will be accepted, as far as is known."""
        waits = self.pauses or (self._indexer is not None and self._to_index > MAX_INDEXED_TOKENS)
        if not self.active or waits or self._request.drafting.max_nodes == 0:
            return 0.0
        return self.account.expected

    @property
    def top_k(self) -> int:
        """How many of the most probable tokens at each node the next `observe` needs."""
        return self._top_k if self.observes_now else 0

    def ready(self, indexing: IndexingBudget) -> bool:
        """Whether it drafts in this step, to be asked before each: it pauses while drafts do not pay, and waits until
        its prompt is indexed."""
        self._paused = self._pause > 0
        if self._paused:
            self._pause -= 1
            return False
        self._start_once()
        if self._indexer is not None:
            self._index(indexing, indexing.left)
        if self._indexer is None and self._deferred:
            self._catch_up()
        self.drafting = self.observes_now
        return self.drafting

    def index_ahead(self, indexing: IndexingBudget, tokens: int) -> None:
        """In a step that reads `tokens` of a prompt that goes on: indexes as many, if the budget allows it."""
        self._start_once()
        if self._indexer is not None:
            self._index(indexing, min(tokens, indexing.left))

    @property
    def observes_now(self) -> bool:
        """It learns at once of what is accepted. If not, and it is `active`, that is kept until its next draft."""
        return self.drafter is not None and not self._paused and self._indexer is None

    def learned(self, accepted: Int32Array) -> None:
        """Its device has learned this, int32[n], already."""
        if self._on_device is not None:
            self._on_device.keep(accepted)

    def defer(self, accepted: list[int]) -> None:
        """Keeps what was accepted until its next draft, when it learns of it."""
        if self.active:
            self._deferred += accepted

    @property
    def can_drop_part(self) -> bool:
        """It goes on while it is expensive, until it can do without one of its parts."""
        return self._composite and self._has_spare_part

    def pause(self, steps: int) -> None:
        """After a draft: it is not asked for so many steps."""
        self.drafting = False
        if steps:
            self._pause = max(steps, self._pause)
            self.stats.suspensions += self.account.suspended

    def add_seconds(self, seconds: float) -> None:
        """A call took so long for it."""
        self.stats.draft_seconds += seconds

    def limit_cost(self) -> None:
        """Drafting took more than it may: suspends it, or of its parts the slowest; ends it if one call took too long.

        Whether drafts pay depends on the step's time and on the text, so they may pay later.
        """
        if self.drafter is None:
            return
        fault = self.account.fault()
        method = "drop_slowest" if fault else "suspend_slowest"
        try:
            self._has_spare_part = self._composite and bool(getattr(self.drafter, method)())
        except Exception as error:
            self._switch_off(_raised(method, error), error)
            return
        if self._has_spare_part:
            self.account.clear()
        elif fault:
            self._switch_off(fault)
        else:
            self._pause = self.account.suspend()
        self.stats.suspensions += not fault

    def failed(self, method: str, error: Exception) -> None:
        """A call raised this."""
        self._switch_off(_raised(method, error), error)

    def close(self) -> None:
        """Closes the drafter; further calls do nothing."""
        if self._deferred and self._request.learns:
            self._start_once()
            self._catch_up()
        drafter, self.drafter, self._unstarted, self._indexer = self.drafter, None, None, None
        self._on_device = None
        if drafter is None:
            return
        try:
            try:
                if isinstance(drafter, Composite):
                    self.stats.by_source = SourceCounts.summed([self.stats.by_source, drafter.by_source])
            finally:
                limited(self.watchdog, False, drafter.close)
        except Exception as error:
            if not self.stats.drafting_disabled_reason:
                self._switch_off(_raised("close", error), error)

    def _start_once(self) -> None:
        if self._unstarted is not None:
            strategy, self._unstarted = self._unstarted, None
            self._start(strategy)

    def _index(self, indexing: IndexingBudget, most: int) -> None:
        """Lets the drafter index so much more of the prompt."""
        if most <= 0 or self._indexer is None:
            return
        try:
            done = TimedCalls([self]).timed([0], self._indexer, self._indexer.index_prompt, most)
        except Exception as error:
            self.failed("index_prompt", error)
            return
        indexing.left -= done
        self._to_index -= done
        if done < most:
            self._indexer = None
        TimedCalls([self]).limit_costs()

    def _catch_up(self) -> None:
        """Passes on what was written while it was not asked."""
        unseen, self._deferred = self._deferred, []
        if unseen and self.drafter is not None:
            try:
                TimedCalls([self]).timed([0], self.drafter, self.drafter.observe, np.array(unseen, np.int32), None)
            except Exception as error:
                self.failed("observe", error)
            TimedCalls([self]).limit_costs()

    def _start(self, strategy: Strategy) -> None:
        method = "start"
        try:
            top_k = int(strategy.top_k)
            if not 0 <= top_k <= self.vocab_size:
                raise ValueError(f"top_k: {top_k} is not allowed; it must lie in [0, {self.vocab_size}]")
            request = self._request
            if request.learns:
                start = strategy.start
            elif isinstance(strategy, SupportsReadOnly):
                method, start = "start_read_only", strategy.start_read_only
            else:
                self.stats.drafting_disabled_reason = f"{request.drafting.strategy} cannot draft without learning"
                return
            self.drafter = TimedCalls([self]).timed([0], strategy, start, request.prompt.copy())
            self._top_k = top_k
            if isinstance(self.drafter, DraftsForRow):
                self.drafter.follow_row(self._row)
            self._indexer = self.drafter if isinstance(self.drafter, PromptIndexer) else None
            self._on_device = self.drafter if isinstance(self.drafter, DeviceDrafter) else None
            if isinstance(self.drafter, Composite):
                self._composite = True
                self.drafter.limit_tokens(self.vocab_size)
        except Exception as error:
            self._switch_off(_raised(method, error), error)

    def _switch_off(self, reason: str, error: Exception | None = None) -> None:
        request = self._request
        _log.error(
            "strategy %r is switched off for request %r: %s",
            request.drafting.strategy,
            request.request_id,
            reason,
            exc_info=error,
        )
        self._failures[request.drafting.strategy] += 1
        self.stats.drafting_disabled_reason = reason
        self.close()


def _raised(call: str, error: Exception) -> str:
    return f"{call} raised {type(error).__name__}: {error}"
