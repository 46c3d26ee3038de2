"""Which arm a request belongs to: a function of the salt, the tenant and the unit, the same on every replica.

The first 24 bytes of SHA-256 make three independent numbers: one decides whether the unit takes part, one its arm, one
its bucket (see `counts`). Nothing is stored, so an assignment survives restarts and needs no agreement of replicas.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from itertools import accumulate

BUCKETS = 256
"""Groups of units within an arm, whose sums are counted. 256 put 4% of noise on a standard error, 64 put 9%."""


class ExperimentError(ValueError):
    """A definition of an experiment, or a change of it, that is not allowed; the message names field and value."""


@dataclass(frozen=True, slots=True)
class UnitAssignment:
    """The arm of a unit, by its position in `Split.arms`, and its bucket, 0 to `BUCKETS - 1`."""

    arm: int
    bucket: int


@dataclass(frozen=True, slots=True)
class Split:
    """How units are divided. The first arm is the control.

    Attributes:
        salt: random bytes of this experiment, so that its assignment is independent of every other experiment's.
        arms: names of the arms, distinct.
        weights: for each arm a positive number; its share of the units is its part of their sum.
        coverage: share of the units that take part, 0 to 1. Raising it moves no unit to another arm.
        tenants: the tenants that take part; None for all.

    Raises:
        ExperimentError: the salt is too short, or two arms have one name.
    """

    salt: bytes
    arms: tuple[str, ...]
    weights: tuple[float, ...]
    coverage: float = 1.0
    tenants: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if len(self.salt) < 8:
            raise ExperimentError(f"salt: {len(self.salt)} bytes; at least 8 are needed")
        if len(set(self.arms)) != len(self.arms):
            raise ExperimentError(f"arms: {str(list(self.arms))[:80]}; names that differ are needed")

    @property
    def shares(self) -> tuple[float, ...]:
        """The expected share of each arm among the units that take part."""
        return tuple(weight / math.fsum(self.weights) for weight in self.weights)

    def assign(self, tenant: str, unit: str, *, overridden: bool = False) -> UnitAssignment | None:
        """The arm of a unit; None if it does not take part.

        Args:
            tenant: the caller's tenant; the same key of two tenants is two units.
            unit: key of the session, or id of the request.
            overridden: the caller chose strategy or draft budget itself, so the request belongs to no arm.
        """
        if overridden or (self.tenants is not None and tenant not in self.tenants):
            return None
        parts = (self.salt, tenant.encode(), unit.encode())
        hashed = hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()
        taking_part, position = (int.from_bytes(hashed[at : at + 8], "big") / 2.0**64 for at in (0, 8))
        if taking_part >= self.coverage:
            return None
        ends = list(accumulate(self.shares))
        arm = next((arm for arm, end in enumerate(ends) if position < end), len(ends) - 1)
        return UnitAssignment(arm, int.from_bytes(hashed[16:24], "big") % BUCKETS)


def require_allowed_change(running: Split, changed: Split) -> None:
    """Raises ExperimentError unless a running experiment may be changed like this: only its coverage may grow.

    Other changes would give units another arm, or mix two populations in one comparison.
    """
    for name in ("salt", "arms", "weights", "tenants"):
        if getattr(running, name) != getattr(changed, name):
            raise ExperimentError(f"{name}: frozen while the experiment runs; stop it and create another one")
    if changed.coverage < running.coverage:
        raise ExperimentError(
            f"coverage: {changed.coverage:g} is less than {running.coverage:g}; it can only grow in a running one"
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """What an arm may do without being stopped.

    Attributes:
        alpha: probability that an arm within the limits is ever stopped, for each guardrail and arm.
        slower_ttft: mean TTFT over the control's that is tolerated; 0.1 is 10% more.
        differing: share of audited answers that may differ: ties of bfloat16 flip between kernels.
    """

    alpha: float = 0.01
    slower_ttft: float = 0.1
    differing: float = 0.001

    def __post_init__(self) -> None:
        for name, value in (("alpha", self.alpha), ("differing", self.differing)):
            if not 0.0 < value < 1.0:
                raise ValueError(f"{name}: {value} is not allowed; it must be between 0 and 1")
        if not 0.0 <= self.slower_ttft < math.inf:
            raise ValueError(f"slower_ttft: {self.slower_ttft} is not allowed; it must be at least 0")
