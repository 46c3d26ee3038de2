"""Whether drafting pays for a sequence: the time it took, against the time that accepted tokens saved. No torch.

An accepted token saves one step for one sequence. In a step that several sequences share, that is worth its share of
the step only: the others would have taken it anyway. A draft costs the time in the drafter, and what its nodes add to
the step that verifies them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LONGEST_CALL = 1.0
"""Seconds that one call of a drafter may take: all sequences wait for it."""
TOLERATED_SHARE = 0.25
"""Share of the model's time that drafting may take and save nothing, in text that no strategy can predict."""
LEAST_CREDIT, CREDIT_STEPS = 0.25, 32
"""Debt that drafting may have besides: these seconds over all sequences that share a step, or the time of so many
steps if that is more. The first drafts of a sequence rarely pay, and a busy machine stops any thread now and then.
In a step of n sequences each has the credit of `CREDIT_STEPS` / sqrt(n) steps, so that together they may owe sqrt(n)
times what one may, and not n times."""
_LARGEST_CHARGE = 0.5
"""Share of the credit that one call is charged at most: a single stall of the machine must not end drafting."""

LONGEST_PAUSES = 15, 63
"""Steps without a draft, at most, while drafts do not pay: one in 16 still tries, or one in 64 if the latest drafts of
this tenant did not pay either."""
_RECENT, _RECENT_OF_TENANT = 8, 64
"""Drafts that the means of a sequence, and of a tenant, cover."""

_called: set[tuple[type, str]] = set()
"""Methods that a class had its first call of. That one may compile and is not counted."""


def is_first_call(owner: object, method: str) -> bool:
    """Whether the class of `owner` has this method called for the first time; notes the call."""
    key = type(owner), method
    first = key not in _called
    _called.add(key)
    return first


@dataclass(slots=True)
class Payoff:
    """Gain and cost of a draft, the mean over the latest ones.

    Attributes:
        accepted: its accepted tokens.
        seconds: time in the drafter.
        verifying: what its nodes add to the step.
        drafts: how many the mean is over; the initial value, an optimistic guess, counts as one.
    """

    accepted: float = 1.0
    seconds: float = 0.0
    verifying: float = 0.0
    drafts: int = 1

    def add(self, accepted: float, seconds: float, verifying: float, most: int) -> None:
        """Adds a draft; the mean is over at most `most` from now on."""
        self.drafts = min(self.drafts + 1, most)
        self.accepted += (accepted - self.accepted) / self.drafts
        self.seconds += (seconds - self.seconds) / self.drafts
        self.verifying += (verifying - self.verifying) / self.drafts

    def pays(self, step: float) -> bool:
        """Whether it saves more time than it takes, if a step without it takes so many seconds."""
        return self.accepted * step >= self.seconds + self.verifying


class DraftAccount:
    """The account of one sequence, which each call of its drafter is charged to.

    Args:
        tenant: what drafts of this tenant by the same strategy gain and cost. The sequence expects the same of its
            own, and adds its results.

    Attributes:
        overdrawn: drafting must end, see `verdict`.
    """

    def __init__(self, tenant: Payoff) -> None:
        self._tenant = tenant
        self._own = Payoff(tenant.accepted, tenant.seconds, tenant.verifying, _RECENT)
        self._pause = 0
        self._first_step: float | None = None
        self._sharing = 1
        self._step_seconds, self._credit, self._limit = 0.0, LEAST_CREDIT, math.inf
        self.overdrawn = False
        self.clear()

    @property
    def expected(self) -> float:
        """Accepted tokens of a draft, on average over the latest ones."""
        return self._own.accepted

    def clear(self) -> None:
        """Begins anew: costs so far are forgiven."""
        self._spent = self._charged = self._longest = 0.0
        self._steps, self._accepted, self._step_total = 0, 0, 0.0
        self._verifying = self._latest_verifying = 0.0
        self._paused_at = self._spent, self._accepted
        self._estimate()

    def step(self, seconds: float, accepted: int, sharing: int = 1, verifying: float = 0.0) -> None:
        """A step in which the sequence wrote tokens.

        Args:
            seconds: of the model.
            accepted: draft tokens that were accepted.
            sharing: how many sequences shared the step.
            verifying: seconds that the draft of this sequence added to it, as far as is known.
        """
        self._sharing = sharing
        self._latest_verifying = verifying
        self._accepted += accepted
        share = seconds / sharing
        if self._first_step is None:
            self._first_step = share  # includes the prompt, so it is no measure of later steps
        else:
            self._steps += 1
            self._step_total += share
            self._verifying += min(verifying, share)
        self._estimate()

    def charge(self, seconds: float) -> None:
        """Time that a call of the drafter took."""
        self._spent += seconds
        self._charged += min(seconds, _LARGEST_CHARGE * self._credit)
        if seconds > self._longest:
            self._longest = seconds
        if self._charged > self._limit or seconds > LONGEST_CALL:
            self.overdrawn = True

    def verdict(self) -> str:
        """Why drafting must end; "" while it may go on."""
        if not self.overdrawn:
            return ""
        if self._longest > LONGEST_CALL:
            return f"it is too slow: one call took {self._longest:.3g} s"
        saved = self._step_seconds * self._accepted
        return (
            f"it is too slow: it took {self._spent:.3g} s, and its {self._accepted} accepted tokens saved {saved:.3g} s"
        )

    def pause(self) -> int:
        """Steps to go without a draft, after one with: 0 while accepted tokens save more time than drafting takes, else
        twice as many as the last time. Drafting that is not even cheap is ended by `verdict` instead."""
        spent, accepted = self._paused_at
        self._paused_at = self._spent, self._accepted
        step = self._step_seconds
        # More than a step is a stall of the machine, or a strategy that `verdict` ends.
        latest = self._accepted - accepted, min(self._spent - spent, step), self._latest_verifying
        self._own.add(*latest, _RECENT)
        self._tenant.add(*latest, _RECENT_OF_TENANT)
        plain = step - self._verifying / self._steps if self._steps else step
        if self._own.pays(plain) or self._own.seconds > 2 * TOLERATED_SHARE * step:
            self._pause = 0
            return 0
        hopeless = self._tenant.drafts == _RECENT_OF_TENANT and not self._tenant.pays(plain)
        self._pause = min(2 * self._pause + 1, LONGEST_PAUSES[1 if hopeless else 0])
        return self._pause

    def _estimate(self) -> None:
        """Sets the share of this sequence in a step of the model (before a second one that of the first, 0 before
        that), what drafting may cost before it saves anything, and what it may have cost by now."""
        step = self._step_total / self._steps if self._steps else self._first_step or 0.0
        self._step_seconds = step
        self._credit = max(LEAST_CREDIT / self._sharing, CREDIT_STEPS * step / math.sqrt(self._sharing))
        saved = step * self._accepted
        self._limit = saved + TOLERATED_SHARE * self._step_total + self._credit if step else math.inf
        self.overdrawn = self._longest > LONGEST_CALL or self._charged > self._limit
