"""Whether drafting pays for a sequence: the time it took, against the time that accepted tokens saved. No torch.

An accepted token saves one step for one sequence. In a step that several sequences share, that is worth its share of
the step only: the others would have taken it anyway. A draft costs the time in the drafter, and what its nodes add to
the step that verifies them.

Drafting that does not pay is suspended for some steps and then tried again. It is at fault, and ends, only where a
single call holds up all sequences (`LONGEST_CALL`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf

import numpy as np

from draftwood_strategies.native import (
    Float64Array,
    Int32Array,
    Int64Array,
    Real,
    address_of,
    compiled,
    float64s,
)

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
"""Steps without a draft, at most, while cheap drafts do not pay: one in 16 still tries, or one in 64 if the latest
drafts of this tenant did not pay either."""
TRIED_SHARE = 1 / 64
"""Share of the model's time that drafts may take which are tried although they do not pay. Not tuned."""
_RECENT, _RECENT_OF_TENANT = 8, 64
"""Drafts that the means of a sequence, and of a tenant, cover."""

_ACCEPTED, _SECONDS, _VERIFYING, _DRAFTS = range(4)
"""The mean draft, the first four numbers of an account and all of a `Payoff`."""
_MEANS = 4
(
    _SPENT, _CHARGED, _LONGEST, _SPENT_BEFORE, _ACCEPTED_BEFORE, _PAUSE, _STEPS, _STEP_TOTAL, _ACCEPTED_TOTAL,
    _VERIFYING_TOTAL, _LATEST_VERIFYING, _LATEST_DRAFT, _FIRST_STEP, _SHARING, _STEP_SECONDS, _CREDIT, _LIMIT,
) = range(_MEANS, _MEANS + 17)  # fmt: skip
_ROW = _MEANS + 17

_called: set[tuple[type, str]] = set()
"""Methods that a class had its first call of. That one may compile and is not counted."""


def is_first_call(owner: object, method: str) -> bool:
    """Whether the class of `owner` has this method called for the first time; notes the call."""
    key = type(owner), method
    first = key not in _called
    _called.add(key)
    return first


class Payoff:
    """Gain and cost of a draft, the mean over the latest ones of a tenant by one strategy."""

    def __init__(self) -> None:
        self._row: Float64Array = np.array([1.0, 0.0, 0.0, 1.0])  # an optimistic guess, which counts as one draft
        self.address = address_of(self._row)

    @property
    def accepted(self) -> float:
        """Accepted tokens of a draft."""
        return float(self._row[_ACCEPTED])

    def means(self) -> Float64Array:
        """float64[4], see `_ACCEPTED` and the others."""
        return self._row


class DraftAccount:
    """The account of one sequence, which each call of its drafter is charged to. Those of all sequences of a step are
    kept in one call: `charge_all`, `step_all`, `pause_all`.

    Args:
        tenant: what drafts of this tenant by the same strategy gain and cost. The sequence expects the same of its
            own, and adds its results.
    """

    def __init__(self, tenant: Payoff) -> None:
        self.tenant = tenant
        self._row: Float64Array = np.zeros(_ROW)
        self.address = address_of(self._row)
        self._row[:_MEANS] = tenant.means()
        self._row[_DRAFTS] = _RECENT
        self._row[_FIRST_STEP] = -1.0
        self._row[_SHARING] = 1.0
        self.clear()

    @property
    def expected(self) -> float:
        """Accepted tokens of a draft, on average over the latest ones."""
        return float(self._row[_ACCEPTED])

    @property
    def suspended(self) -> bool:
        """The latest pause is longer than those of cheap drafts."""
        return bool(self._row[_PAUSE] > LONGEST_PAUSES[1])

    def clear(self) -> None:
        """Begins anew: costs so far are forgiven."""
        row = self._row
        for entry in (_SPENT, _CHARGED, _LONGEST, _SPENT_BEFORE, _ACCEPTED_BEFORE, _STEPS, _STEP_TOTAL):
            row[entry] = 0.0
        row[_ACCEPTED_TOTAL] = row[_VERIFYING_TOTAL] = row[_LATEST_VERIFYING] = 0.0
        _estimate(row, LEAST_CREDIT)

    def fault(self) -> str:
        """Why drafting must end; "" while it may go on, if only after a pause."""
        longest = self._row[_LONGEST]
        return f"it is too slow: one call took {longest:.3g} s" if longest > LONGEST_CALL else ""

    def suspend(self) -> int:
        """Steps to go without a draft to make up for the debt, which is forgiven then."""
        pause = 0
        if self._row[_STEP_SECONDS] > 0.0:
            pause = math.ceil(self._row[_CHARGED] / (TRIED_SHARE * self._row[_STEP_SECONDS]))
        self.clear()
        self._row[_PAUSE] = pause
        return pause


def rows_of(accounts: SequenceOf[DraftAccount]) -> Int64Array:
    """int64[s], the addresses of their numbers, for what is done for several at once."""
    return np.array([account.address for account in accounts], np.int64)


def charge_all(rows: Int64Array, seconds: float) -> None:
    """A call of drafters took so long for each of these sequences, `rows_of` their accounts."""
    _charge_all(rows, seconds)


def step_all(
    accounts: SequenceOf[DraftAccount], seconds: float, accepted: Int32Array, verifying: Float64Array, sharing: int
) -> None:
    """A step in which these sequences wrote tokens.

    Args:
        seconds: of the model.
        accepted: int32[s], draft tokens that were accepted.
        verifying: float64[s], seconds that the draft of each added to the step, as far as is known.
        sharing: how many sequences shared the step.
    """
    _step_all(rows_of(accounts), seconds, accepted, verifying, sharing, LEAST_CREDIT)


def overdrawn(rows: Int64Array) -> list[int]:
    """The numbers of those, `rows_of` their accounts, that cost more than they may: they must be suspended, or are at
    `fault`."""
    found = np.empty(rows.shape[0], np.int32)
    numbers: list[int] = found[: _overdrawn(rows, LONGEST_CALL, found)].tolist()
    return numbers


def pause_all(accounts: SequenceOf[DraftAccount], lasting: SequenceOf[bool]) -> list[int]:
    """For each sequence that had a draft in the latest step, the steps to go without one: 0 while accepted tokens save
    more time than drafting takes, else twice as many as the last time, and more if drafts are expensive.

    Args:
        lasting: of each, whether expensive drafts go on until the account is overdrawn, as its drafter can do without
            a part then.
    """
    tenants = np.array([account.tenant.address for account in accounts], np.int64)
    pauses = np.empty(len(accounts), np.int32)
    _pause_all(rows_of(accounts), tenants, np.array(lasting, np.int32), *LONGEST_PAUSES, TRIED_SHARE, pauses)
    return pauses.tolist()


@compiled
def _charge_all(rows: Int64Array, seconds: float) -> None:
    for s in range(rows.shape[0]):
        row = float64s(rows[s], _ROW)
        row[_SPENT] += seconds
        row[_CHARGED] += min(seconds, _LARGEST_CHARGE * row[_CREDIT])
        row[_LONGEST] = max(row[_LONGEST], seconds)


@compiled
def _step_all(
    rows: Int64Array, seconds: float, accepted: Int32Array, verifying: Float64Array, sharing: int, least_credit: float
) -> None:
    share = seconds / sharing
    for s in range(rows.shape[0]):
        row = float64s(rows[s], _ROW)
        row[_SHARING] = sharing
        row[_LATEST_VERIFYING] = verifying[s]
        row[_ACCEPTED_TOTAL] += accepted[s]
        if row[_FIRST_STEP] < 0.0:
            row[_FIRST_STEP] = share  # includes the prompt, so it is no measure of later steps
        else:
            row[_STEPS] += 1.0
            row[_STEP_TOTAL] += share
            row[_VERIFYING_TOTAL] += min(verifying[s], share)
        _estimate(row, least_credit)


@compiled
def _overdrawn(rows: Int64Array, longest_call: float, found: Int32Array) -> int:
    n = 0
    for s in range(rows.shape[0]):
        row = float64s(rows[s], _ROW)
        if row[_LONGEST] > longest_call or row[_CHARGED] > row[_LIMIT]:
            found[n] = s
            n += 1
    return n


@compiled
def _pause_all(
    rows: Int64Array,
    tenants: Int64Array,
    lasting: Int32Array,
    longest: int,
    longest_hopeless: int,
    tried_share: float,
    pauses: Int32Array,
) -> None:
    for s in range(rows.shape[0]):
        row, tenant = float64s(rows[s], _ROW), float64s(tenants[s], _MEANS)
        step = row[_STEP_SECONDS]
        accepted = row[_ACCEPTED_TOTAL] - row[_ACCEPTED_BEFORE]
        spent, before = row[_SPENT] - row[_SPENT_BEFORE], row[_LATEST_DRAFT]
        row[_SPENT_BEFORE], row[_ACCEPTED_BEFORE], row[_LATEST_DRAFT] = row[_SPENT], row[_ACCEPTED_TOTAL], spent
        counted = min(spent, step)  # more is a stall of the machine, or shows in `steady`
        _add(row, accepted, counted, row[_LATEST_VERIFYING], _RECENT)
        _add(tenant, accepted, counted, row[_LATEST_VERIFYING], _RECENT_OF_TENANT)
        plain = step - row[_VERIFYING_TOTAL] / row[_STEPS] if row[_STEPS] else step
        steady = max(row[_SECONDS], min(spent, before)) if step > 0.0 else 0.0
        expensive = steady > 2.0 * TOLERATED_SHARE * step
        pause = 0.0
        gain = row[_ACCEPTED] if steady == row[_SECONDS] else max(row[_ACCEPTED], accepted)
        if gain * plain < steady + row[_VERIFYING] and not (expensive and lasting[s]):
            hopeless = tenant[_DRAFTS] == _RECENT_OF_TENANT and not _pays(tenant, plain)
            pause = min(2.0 * row[_PAUSE] + 1.0, longest_hopeless if hopeless else longest)
            if expensive:
                pause = max(pause, steady / (tried_share * step))
        row[_PAUSE] = pause
        pauses[s] = pause


@compiled
def _add(means: Float64Array, accepted: Real, seconds: Real, verifying: Real, most: int) -> None:
    """Adds a draft; the means are over at most `most` from now on."""
    means[_DRAFTS] = min(means[_DRAFTS] + 1.0, most)
    means[_ACCEPTED] += (accepted - means[_ACCEPTED]) / means[_DRAFTS]
    means[_SECONDS] += (seconds - means[_SECONDS]) / means[_DRAFTS]
    means[_VERIFYING] += (verifying - means[_VERIFYING]) / means[_DRAFTS]


@compiled
def _pays(means: Float64Array, step: Real) -> bool:
    """Whether a draft saves more time than it takes, if a step without it takes so many seconds."""
    return bool(means[_ACCEPTED] * step >= means[_SECONDS] + means[_VERIFYING])


@compiled
def _estimate(row: Float64Array, least_credit: float) -> None:
    """Sets the share of this sequence in a step of the model (before a second one that of the first, 0 before
    that), what drafting may cost before it saves anything, and what it may have cost by now."""
    step = row[_STEP_TOTAL] / row[_STEPS] if row[_STEPS] else max(row[_FIRST_STEP], 0.0)
    row[_STEP_SECONDS] = step
    row[_CREDIT] = max(least_credit / row[_SHARING], CREDIT_STEPS * step / math.sqrt(row[_SHARING]))
    row[_LIMIT] = math.inf
    if step > 0.0:
        row[_LIMIT] = step * row[_ACCEPTED_TOTAL] + TOLERATED_SHARE * row[_STEP_TOTAL] + row[_CREDIT]
