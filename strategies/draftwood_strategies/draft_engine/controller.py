"""The controller of how much to draft: what drafts are expected to gain, against what they were measured to cost.

An accepted token saves one step for one sequence. In a step that several sequences share, that is worth its share of
the step only: the others would have taken it anyway. A draft costs the time in the drafter, and what its nodes add to
the step that verifies them.

Drafting that does not pay is suspended for some steps and then tried again. It is at fault, and ends, only where a
single call holds up all sequences (`MAX_CALL_SECONDS`). With many sequences a drafter is asked for few nodes more than
it lately had verified (`worth_proposing`). Which nodes of a step's drafts are then verified is decided in `worth`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from draftwood_strategies.arrays import Float64Array, Int32Array, Int64Array, Integer, Real
from draftwood_strategies.native import address_of, compiled, record_at, record_dtype

MAX_CALL_SECONDS = 1.0
"""Seconds that one call of a drafter may take: all sequences wait for it."""
TOLERATED_SHARE = 0.25
"""Share of the model's time that drafting may take and save nothing, in text that no strategy can predict."""
MIN_CREDIT_SECONDS, CREDIT_STEPS = 0.25, 32
"""Debt that drafting may have besides: these seconds over all sequences that share a step, or the time of so many
steps if that is more. The first drafts of a sequence rarely pay, and a busy machine stops any thread now and then.
In a step of n sequences each has the credit of `CREDIT_STEPS` / sqrt(n) steps, so that together they may owe sqrt(n)
times what one may, and not n times."""
_MAX_CHARGE = 0.5
"""Share of the credit that one call is charged at most: a single stall of the machine must not end drafting."""
MAX_PAUSES = 15, 63
"""Steps without a draft, at most, while cheap drafts do not pay: one in 16 still tries, or one in 64 if the latest
drafts of this tenant did not pay either."""
_PROPOSED, _MIN_PROPOSED = 512, 8
"""Nodes that the drafters of a step may always propose together, and each of them: with 8 sequences 64 for each."""
_MORE_THAN_VERIFIED = 4
"""A drafter may propose so many times the nodes that it had verified last."""
_TRIED_AHEAD = 16
"""Nodes that steps which verify them in any case have room for, over all drafts that begin. Not tuned."""
TRIED_SHARE = 1 / 64
"""Share of the model's time that drafts may take which are tried although they do not pay."""
_RECENT, _RECENT_OF_TENANT = 8, 64
"""Drafts that the means of a sequence, and of a tenant, cover."""

_MEAN_DRAFT = {"accepted": np.float64, "seconds": np.float64, "verifying": np.float64, "drafts": np.float64}
MEANS = record_dtype(**_MEAN_DRAFT)
"""The mean over the latest drafts of accepted tokens, of seconds in the drafter and of seconds that the nodes add to
the step; and how many drafts that are."""
ACCOUNT = record_dtype(
    **_MEAN_DRAFT,
    spent=np.float64,
    charged=np.float64,
    longest=np.float64,
    spent_before=np.float64,
    accepted_before=np.float64,
    pause=np.float64,
    steps=np.float64,
    step_total=np.float64,
    accepted_total=np.float64,
    verifying_total=np.float64,
    latest_verifying=np.float64,
    latest_draft=np.float64,
    first_step=np.float64,
    sharing=np.float64,
    step_seconds=np.float64,
    credit=np.float64,
    limit=np.float64,
)
"""It begins with the fields of `MEANS`. `spent` are seconds in the drafter, `charged` those of them that count,
`longest` those of the longest call; `spent_before` and `accepted_before` are what was spent and accepted before the
latest draft, `pause` is the latest pause in steps. `steps` are those after the first one, `step_total` their seconds,
`accepted_total` their accepted tokens, `verifying_total` their seconds for nodes. `step_seconds` is what a step takes
this sequence, `credit` what drafts may cost before they save anything, and `limit` what they may have cost by now."""

_called: set[tuple[type, str]] = set()
"""Methods that a class had its first call of. That one may compile and is not counted."""


def is_first_call(owner: object, method: str) -> bool:
    """Whether the class of `owner` has this method called for the first time; notes the call."""
    key = type(owner), method
    first = key not in _called
    _called.add(key)
    return first


class DraftCostModel:
    """What a draft costs and gains: the mean over the latest ones of a tenant by one strategy."""

    def __init__(self) -> None:
        self.means = np.array([(1.0, 0.0, 0.0, 1.0)], MEANS)  # an optimistic guess, which counts as one draft
        self.address = address_of(self.means)

    @property
    def accepted(self) -> float:
        """Accepted tokens of a draft."""
        return float(self.means["accepted"][0])


class DraftAccount:
    """The account of one sequence, which each call of its drafter is charged to. Those of all sequences of a step are
    kept in one call: `charge_all`, `step_all`, `pause_all`.

    Args:
        tenant: what drafts of this tenant by the same strategy gain and cost. The sequence expects the same of its
            own, and adds its results.
    """

    def __init__(self, tenant: DraftCostModel) -> None:
        self.tenant = tenant
        self._row = np.zeros(1, ACCOUNT)
        self.address = address_of(self._row)
        for name in MEANS.fields or ():
            self._row[name] = tenant.means[name]
        self._row["drafts"] = _RECENT
        self._row["first_step"] = -1.0
        self._row["sharing"] = 1.0
        self.clear()

    @property
    def expected(self) -> float:
        """Accepted tokens of a draft, on average over the latest ones."""
        return float(self._row["accepted"][0])

    @property
    def suspended(self) -> bool:
        """The latest pause is longer than those of cheap drafts."""
        return bool(self._row["pause"][0] > MAX_PAUSES[1])

    def clear(self) -> None:
        """Resets the account: costs so far are forgiven."""
        _clear(self.address, MIN_CREDIT_SECONDS)

    def fault(self) -> str:
        """Why drafting must end; "" while it may go on, if only after a pause."""
        longest = float(self._row["longest"][0])
        return f"it is too slow: one call took {longest:.3g} s" if longest > MAX_CALL_SECONDS else ""

    def suspend(self) -> int:
        """Steps to go without a draft to make up for the debt, which is forgiven then."""
        step, charged = float(self._row["step_seconds"][0]), float(self._row["charged"][0])
        pause = math.ceil(charged / (TRIED_SHARE * step)) if step > 0.0 else 0
        self.clear()
        self._row["pause"] = pause
        return pause


def worth_proposing(nodes: int, verified: int, sharing: int) -> int:
    """How many nodes, at most `nodes`, a drafter is asked for in a step of `sharing` sequences if its latest draft had
    so many verified: with many sequences, few nodes of each are worth verifying, and proposing the others takes longer
    than all else that the host does."""
    return min(nodes, max(_MIN_PROPOSED, _PROPOSED // sharing, _MORE_THAN_VERIFIED * verified))


def worth_drafting_ahead(nodes: int, drafted: int, worth: int, sharing: int) -> int:
    """How many nodes, at most `nodes` and at least one, the draft of one of `sharing` sequences has room for in a step
    that verifies the room, used or not: what was worth its time in its latest draft and some more, or twice as many if
    all that it had room for was.

    Args:
        drafted: what the latest draft had room for; 0 if the latest step had none.
        worth: how many of its nodes were worth their time.
    """
    if not drafted:
        return min(nodes, max(1, _TRIED_AHEAD // sharing))
    return min(nodes, 2 * worth if worth == drafted else worth + worth // 4 + 1)


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
    _step_all(rows_of(accounts), seconds, accepted, verifying, sharing, MIN_CREDIT_SECONDS)


def overdrawn(rows: Int64Array) -> list[int]:
    """The numbers of those, `rows_of` their accounts, that cost more than they may: they must be suspended, or are at
    `fault`."""
    overdrawn_rows = np.empty(rows.shape[0], np.int32)
    numbers: list[int] = overdrawn_rows[: _overdrawn(rows, MAX_CALL_SECONDS, overdrawn_rows)].tolist()
    return numbers


def pause_all(accounts: SequenceOf[DraftAccount], can_drop_part: SequenceOf[bool]) -> list[int]:
    """For each sequence that had a draft in the latest step, the steps to go without one: 0 while accepted tokens save
    more time than drafting takes, else twice as many as the last time, and more if drafts are expensive.

    Args:
        can_drop_part: of each, whether its drafter can do without a part: then expensive drafts go on until the
            account is overdrawn.
    """
    tenants = np.array([account.tenant.address for account in accounts], np.int64)
    pauses = np.empty(len(accounts), np.int32)
    _pause_all(rows_of(accounts), tenants, np.array(can_drop_part, np.int32), *MAX_PAUSES, TRIED_SHARE, pauses)
    return pauses.tolist()


@compiled
def _clear(address: Integer, least_credit: float) -> None:
    row = record_at(ACCOUNT, address)
    row.spent = row.charged = row.longest = row.spent_before = row.accepted_before = 0.0
    row.steps = row.step_total = row.accepted_total = row.verifying_total = row.latest_verifying = 0.0
    _estimate(row, least_credit)


@compiled
def _charge_all(rows: Int64Array, seconds: float) -> None:
    for s in range(rows.shape[0]):
        row = record_at(ACCOUNT, rows[s])
        row.spent += seconds
        row.charged += min(seconds, _MAX_CHARGE * row.credit)
        row.longest = max(row.longest, seconds)


@compiled
def _step_all(
    rows: Int64Array, seconds: float, accepted: Int32Array, verifying: Float64Array, sharing: int, least_credit: float
) -> None:
    share = seconds / sharing
    for s in range(rows.shape[0]):
        row = record_at(ACCOUNT, rows[s])
        row.sharing = sharing
        row.latest_verifying = verifying[s]
        row.accepted_total += accepted[s]
        if row.first_step < 0.0:
            row.first_step = share  # includes the prompt, so it is no measure of later steps
        else:
            row.steps += 1.0
            row.step_total += share
            row.verifying_total += min(verifying[s], share)
        _estimate(row, least_credit)


@compiled
def _overdrawn(rows: Int64Array, longest_call: float, overdrawn_rows: Int32Array) -> int:
    n = 0
    for s in range(rows.shape[0]):
        row = record_at(ACCOUNT, rows[s])
        if row.longest > longest_call or row.charged > row.limit:
            overdrawn_rows[n] = s
            n += 1
    return n


@compiled
def _pause_all(
    rows: Int64Array,
    tenants: Int64Array,
    can_drop_part: Int32Array,
    longest: int,
    longest_hopeless: int,
    tried_share: float,
    pauses: Int32Array,
) -> None:
    for s in range(rows.shape[0]):
        row, tenant = record_at(ACCOUNT, rows[s]), record_at(MEANS, tenants[s])
        step = row.step_seconds
        accepted = row.accepted_total - row.accepted_before
        spent, before = row.spent - row.spent_before, row.latest_draft
        row.spent_before, row.accepted_before, row.latest_draft = row.spent, row.accepted_total, spent
        counted = min(spent, step)  # more is a stall of the machine, or shows in `steady`
        _add(record_at(MEANS, rows[s]), accepted, counted, row.latest_verifying, _RECENT)
        _add(tenant, accepted, counted, row.latest_verifying, _RECENT_OF_TENANT)
        plain = step - row.verifying_total / row.steps if row.steps else step
        steady = max(row.seconds, min(spent, before)) if step > 0.0 else 0.0
        expensive = steady > 2.0 * TOLERATED_SHARE * step
        pause = 0.0
        gain = row.accepted if steady == row.seconds else max(row.accepted, accepted)
        if gain * plain < steady + row.verifying and not (expensive and can_drop_part[s]):
            hopeless = tenant.drafts == _RECENT_OF_TENANT and not _pays(tenant, plain)
            pause = min(2.0 * row.pause + 1.0, longest_hopeless if hopeless else longest)
            if expensive:
                pause = max(pause, steady / (tried_share * step))
        row.pause = pause
        pauses[s] = pause


@compiled
def _add(means: Any, accepted: Real, seconds: Real, verifying: Real, window: int) -> None:
    """Adds a draft; the means are over at most `most` from now on."""
    means.drafts = min(means.drafts + 1.0, window)
    means.accepted += (accepted - means.accepted) / means.drafts
    means.seconds += (seconds - means.seconds) / means.drafts
    means.verifying += (verifying - means.verifying) / means.drafts


@compiled
def _pays(means: Any, step: Real) -> bool:
    """Whether a draft saves more time than it takes, if a step without it takes so many seconds."""
    return bool(means.accepted * step >= means.seconds + means.verifying)


@compiled
def _estimate(row: Any, least_credit: float) -> None:
    """Sets the share of this sequence in a step of the model (before a second one that of the first, 0 before
    that), what drafting may cost before it saves anything, and what it may have cost by now."""
    step = row.step_total / row.steps if row.steps else max(row.first_step, 0.0)
    row.step_seconds = step
    row.credit = max(least_credit / row.sharing, CREDIT_STEPS * step / math.sqrt(row.sharing))
    row.limit = math.inf
    if step > 0.0:
        row.limit = step * row.accepted_total + TOLERATED_SHARE * row.step_total + row.credit
