"""Guardrails, which stop an arm: more errors, a slower first token, answers that differ. Valid at every look."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from draftwood_service.experiments.statistics.mixture import is_rejected
from draftwood_service.experiments.statistics.ratios import compare
from draftwood_tenants.experiments.assignment import Split
from draftwood_tenants.experiments.counters import Counts
from draftwood_tenants.experiments.limits import Limits
from draftwood_tenants.experiments.outcomes import TTFT, column


@dataclass(frozen=True, slots=True)
class Violation:
    """An arm beyond a limit; `guardrail` is "errors", "ttft" or "differing"."""

    arm: str
    guardrail: str
    reason: str


def violations(
    split: Split, counts: Counts, limits: Limits | None = None, stopped: frozenset[str] = frozenset()
) -> list[Violation]:
    """The arms to stop. The control can only differ: its errors and times are what the others are compared with.

    Args:
        stopped: arms that are stopped already.
    """
    limits = limits or Limits()
    found = []
    for arm, name in enumerate(split.arms):
        if name in stopped:
            continue
        reasons = {
            "errors": _errors(split, counts, arm, limits.alpha) if arm else None,
            "ttft": _slower(counts, arm, limits) if arm else None,
            "differing": _differing(counts, arm, limits),
        }
        found += [Violation(name, guardrail, reason) for guardrail, reason in reasons.items() if reason]
    return found


def _errors(split: Split, counts: Counts, arm: int, alpha: float) -> str | None:
    """If an error does not depend on the arm, each unit that erred is in this arm with the probability of the split."""
    erred = counts.sums[[0, arm], :, column("erred_units")].sum(-1)
    shares = np.array([split.shares[0], split.shares[arm]])
    shares /= shares.sum()
    if erred[1] <= shares[1] * erred.sum() or not is_rejected(erred, shares, alpha):
        return None
    units = counts.sums[[0, arm], :, column("units")].sum(-1)
    return f"{erred[1]:.0f} of {units[1]:.0f} units had errors, {erred[0]:.0f} of {units[0]:.0f} in {split.arms[0]}"


def _slower(counts: Counts, arm: int, limits: Limits) -> str | None:
    low, _ = compare(counts.sums[0], counts.sums[arm], TTFT).sequence(limits.alpha)
    if not low > math.log1p(limits.slower_ttft):
        return None
    return f"the mean time to first token is at least {np.expm1(low):.0%} longer; {limits.slower_ttft:.0%} is allowed"


def _differing(counts: Counts, arm: int, limits: Limits) -> str | None:
    audited, differing = counts.sums[arm][:, [column("audited"), column("differing")]].sum(0)
    if differing <= limits.differing * audited:
        return None
    allowed = np.array([limits.differing, 1.0 - limits.differing])
    if not is_rejected(np.array([differing, audited - differing]), allowed, limits.alpha):
        return None
    return f"{differing:.0f} of {audited:.0f} audited answers differ; {limits.differing:.2%} is allowed"
