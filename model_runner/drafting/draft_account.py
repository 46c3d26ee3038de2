"""Whether a sequence's drafting pays: what it took, against what its accepted tokens saved. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from model_runner.sequence import SequenceStats

LONGEST_CALL = 1.0
"""Seconds that one call may take: all sequences wait for it."""
TOLERATED_SHARE = 0.25
"""Drafting may take this share of the model's time and save nothing, in text that nobody can foresee."""
LEAST_CREDIT, CREDIT_STEPS = 0.25, 32
"""What drafting may owe besides: these seconds, or what so many steps take if that is more. A sequence's first drafts
seldom pay, and a busy machine stops any thread now and then."""

LONGEST_PAUSES = 15, 63
"""Steps without a draft, at most, where drafts do not pay: one in 16 still tries, or one in 64 where this tenant's
latest have not paid either."""
_RECENT, _RECENT_OF_TENANT = 8, 64
"""Drafts that a sequence's, and a tenant's, means are about."""

_called: set[tuple[type, str]] = set()
"""Calls that a class has had its first of. That one may compile and is not counted."""


@dataclass(slots=True)
class Payoff:
    """What a draft brings and takes, the mean over the latest ones.

    Attributes:
        accepted: its accepted tokens.
        seconds: what drafting took.
        drafts: how many the mean is about; the first value, a hope, counts as one.
    """

    accepted: float = 1.0
    seconds: float = 0.0
    drafts: int = 1

    def add(self, accepted: float, seconds: float, most: int) -> None:
        """One more draft; `most` is how many the mean is about from now on."""
        self.drafts = min(self.drafts + 1, most)
        self.accepted += (accepted - self.accepted) / self.drafts
        self.seconds += (seconds - self.seconds) / self.drafts

    def pays(self, step: float) -> bool:
        """Whether it saves more than it takes, where a step takes so many seconds."""
        return self.accepted * step >= self.seconds


class DraftAccount:
    """One sequence's account, on which each call of its drafter is charged.

    An accepted token saves what a step takes, as measured on this sequence's own steps.

    Args:
        stats: the sequence's.
        tenant: what this tenant's drafts by the same strategy bring. The sequence expects as much of its own, and
            adds what came of them.
    """

    def __init__(self, stats: SequenceStats, tenant: Payoff) -> None:
        self._stats = stats
        self._tenant = tenant
        self._own = Payoff(tenant.accepted, tenant.seconds, _RECENT)
        self._pause = 0
        self.clear()

    @property
    def expected(self) -> float:
        """Accepted tokens of a draft, on average over the latest ones."""
        return self._own.accepted

    def clear(self) -> None:
        """Begins anew: what was spent so far is forgiven."""
        stats = self._stats
        self._spent = self._longest = 0.0
        self._steps, self._accepted = stats.decode_steps, stats.accepted_tokens
        self._model_seconds = stats.model_seconds
        self._paused_at = self._spent, self._accepted

    def charge(self, drafter: object, call: str, seconds: float) -> None:
        key = type(drafter), call
        if key not in _called:
            _called.add(key)
            return
        self._spent += seconds
        self._longest = max(self._longest, seconds)

    def verdict(self) -> str:
        """Why drafting must end; "" while it may go on."""
        if self._longest > LONGEST_CALL:
            return f"it is too slow: one call took {self._longest:.3g} s"
        stats = self._stats
        if stats.decode_steps <= 1:  # what the prompt took is no measure of a step
            self._steps, self._model_seconds = stats.decode_steps, stats.model_seconds
        step, steps = self._step_seconds(), stats.decode_steps - self._steps
        if step == 0.0:
            return ""
        accepted = stats.accepted_tokens - self._accepted
        saved, credit = step * accepted, max(LEAST_CREDIT, CREDIT_STEPS * step)
        if self._spent > saved + TOLERATED_SHARE * step * steps + credit:
            return (
                f"it is too slow: it took {self._spent:.3g} s, and its {accepted} accepted tokens saved {saved:.3g} s"
            )
        return ""

    def pause(self) -> int:
        """Steps to go without a draft, after one that was drafted for: 0 while what is accepted saves more time than
        drafting takes, else twice as many as the last time. What is not even cheap ends by `verdict`, not by halves."""
        spent, accepted = self._paused_at
        self._paused_at = self._spent, self._stats.accepted_tokens
        step = self._step_seconds()
        # More than a step is a stall of the machine, or a strategy that `verdict` ends.
        latest = self._stats.accepted_tokens - accepted, min(self._spent - spent, step)
        self._own.add(*latest, _RECENT)
        self._tenant.add(*latest, _RECENT_OF_TENANT)
        hopeless = self._tenant.drafts == _RECENT_OF_TENANT and not self._tenant.pays(step)
        longest = LONGEST_PAUSES[1 if hopeless else 0]
        idle = not self._own.pays(step) and self._own.seconds <= 2 * TOLERATED_SHARE * step
        self._pause = min(2 * self._pause + 1, longest) if idle else 0
        return self._pause

    def _step_seconds(self) -> float:
        """What a step takes the model; before two were measured, the mean of all that it did; 0 before that."""
        stats = self._stats
        steps = stats.decode_steps - self._steps
        if steps <= 1:
            return stats.model_seconds / max(stats.decode_steps, 1)
        return (stats.model_seconds - self._model_seconds) / steps
