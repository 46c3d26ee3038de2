"""What an arm may do before a guardrail stops it."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
