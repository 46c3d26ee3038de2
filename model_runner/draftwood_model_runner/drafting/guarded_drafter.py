"""A drafter that cannot do harm: whatever a strategy does wrong, its sequence continues at plain speed. No torch."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np

from draftwood_model_runner.drafting.draft_account import DraftAccount, Payoff, is_first_call
from draftwood_model_runner.drafting.watchdog import Watchdog
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies import EMPTY_TREE, Drafter, DraftTree, Feedback, Strategy
from draftwood_strategies.base import Composite, Readable
from draftwood_strategies.draft import checked

CALL_LIMIT, FIRST_CALL_LIMIT = 5.0, 120.0
"""Seconds after which a call into a strategy is interrupted; the first one of a class may compile."""

_log = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class GuardedDrafter:
    """The drafter of one sequence: timed, its trees checked, switched off when it fails or does not pay.

    The strategy starts it when the first draft is needed: nothing is drafted while prompts wait, and starting a drafter
    would delay them.

    Args:
        sequence: the sequence to draft for; its statistics take the time spent, the counts by source, and the reason
            why drafting was switched off.
        vocab_size: draft tokens are below it.
        failures: counts, by the name of the strategy, the sequences that it was switched off for.
        payoff: what drafts of this tenant by the same strategy gain and cost; it is kept up to date.
        watchdog: interrupts calls that do not return; None for no limit.

    Attributes:
        account: what its calls cost and gained.
    """

    def __init__(
        self,
        sequence: Sequence,
        vocab_size: int,
        failures: Counter[str],
        payoff: Payoff,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.account = DraftAccount(payoff)
        self._sequence = sequence
        self._vocab_size = vocab_size
        self._failures = failures
        self._watchdog = watchdog
        self._unstarted = sequence.strategy
        self._drafter: Drafter | None = None
        self._top_k = 0
        self._pause = 0
        self._paused = self._asked = False
        self._unseen: list[int] = []

    @property
    def active(self) -> bool:
        """It drafts, or will when it is asked."""
        return self._drafter is not None or self._unstarted is not None

    @property
    def expected(self) -> float:
        """How many tokens of the next draft will be accepted, as far as is known."""
        if not self.active or self._pause > 0 or self._sequence.request.max_draft_nodes == 0:
            return 0.0
        return self.account.expected

    @property
    def top_k(self) -> int:
        """How many of the most probable tokens at each node the next `observe` needs."""
        return 0 if self._paused else self._top_k

    def propose(self, budget: int) -> DraftTree:
        """A valid tree of at most `budget` nodes; empty if there is no draft, or while drafts do not pay."""
        self._paused = self._pause > 0
        if self._paused:
            self._pause -= 1
            return EMPTY_TREE
        self._catch_up()
        drafter = self._drafter
        if drafter is None or budget <= 0:
            return EMPTY_TREE
        self._asked = True
        tree = EMPTY_TREE
        try:
            tree = checked(self._timed(drafter, "propose", drafter.propose, budget), budget, self._vocab_size)
        except Exception as error:
            self._switch_off(_raised("propose", error), error)
        self._sequence.stats.proposed_tokens += len(tree)
        self._judge()
        return tree

    def observe(self, accepted: list[int], feedback: Feedback) -> None:
        """Passes on what was accepted; in a pause it is kept until the next draft."""
        if self._paused or self._unstarted is not None:
            self._unseen += accepted
        elif self._drafter is not None:
            self._observe(accepted, feedback)
            if self._asked:
                self._asked = False
                self._pause = self.account.pause()

    def close(self) -> None:
        """Closes the drafter; further calls do nothing."""
        if self._unseen:
            self._catch_up()
        drafter, self._drafter, self._unstarted = self._drafter, None, None
        if drafter is None:
            return
        try:
            try:
                if isinstance(drafter, Composite):
                    self._sequence.stats.by_source = dict(drafter.by_source)
            finally:
                self._limited(False, drafter.close)
        except Exception as error:
            if not self._sequence.stats.drafting_disabled_reason:
                self._switch_off(_raised("close", error), error)

    def _catch_up(self) -> None:
        """Starts the drafter if that was not done, and passes on what was written while it was not asked."""
        if self._unstarted is not None:
            strategy, self._unstarted = self._unstarted, None
            self._start(strategy)
        if self._unseen:
            unseen, self._unseen = self._unseen, []
            self._observe(unseen, None)

    def _observe(self, accepted: list[int], feedback: Feedback | None) -> None:
        drafter = self._drafter
        if drafter is not None:
            try:
                self._timed(drafter, "observe", drafter.observe, np.array(accepted, np.int32), feedback)
            except Exception as error:
                self._switch_off(_raised("observe", error), error)
            self._judge()

    def _start(self, strategy: Strategy) -> None:
        try:
            top_k = int(strategy.top_k)
            if not 0 <= top_k <= self._vocab_size:
                raise ValueError(f"top_k: {top_k} is not allowed; it must lie in [0, {self._vocab_size}]")
            request = self._sequence.request
            if request.learns:
                method, start = "start", strategy.start
            elif isinstance(strategy, Readable):
                method, start = "start_reading", strategy.start_reading
            else:
                self._sequence.stats.drafting_disabled_reason = f"{request.strategy_name} cannot draft without learning"
                return
            self._drafter = self._timed(strategy, method, start, request.prompt.copy())
            self._top_k = top_k
            if isinstance(self._drafter, Composite):
                self._drafter.limit_tokens(self._vocab_size)
        except Exception as error:
            self._switch_off(_raised("start", error), error)

    def _timed(
        self,
        owner: object,
        method: str,
        function: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """What `function`, the method of that name, returns; its time is charged, whether it returns or raises."""
        first = is_first_call(owner, method)
        started = time.perf_counter()
        try:
            return self._limited(first, function, *args, **kwargs)
        finally:
            seconds = time.perf_counter() - started
            self._sequence.stats.draft_seconds += seconds
            if not first:
                self.account.charge(seconds)

    def _limited(
        self, first: bool, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        if self._watchdog is None:
            return function(*args, **kwargs)
        return self._watchdog.call(FIRST_CALL_LIMIT if first else CALL_LIMIT, function, *args, **kwargs)

    def _judge(self) -> None:
        """If drafting takes too long, drops the part that costs most, or the whole drafter."""
        reason = self.account.verdict()
        if not reason or self._drafter is None:
            return
        try:
            dropped = self._drafter.drop_slowest() if isinstance(self._drafter, Composite) else ""
        except Exception as error:
            self._switch_off(_raised("drop_slowest", error), error)
            return
        if dropped:
            self.account.clear()
        else:
            self._switch_off(reason)

    def _switch_off(self, reason: str, error: Exception | None = None) -> None:
        request = self._sequence.request
        _log.error(
            "strategy %r is switched off for request %r: %s",
            request.strategy_name,
            request.request_id,
            reason,
            exc_info=error,
        )
        self._failures[request.strategy_name] += 1
        self._sequence.stats.drafting_disabled_reason = reason
        self.close()


def _raised(call: str, error: Exception) -> str:
    return f"{call} raised {type(error).__name__}: {error}"
