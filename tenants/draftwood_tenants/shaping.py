"""How sizes and times of a stream's messages are made independent of what they say.

What that hides, and what it does not: docs/security.md, "Traffic analysis".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from draftwood_errors import InvalidValueError

MIN_CADENCE, MAX_CADENCE = 0.01, 60.0
MAX_PADDING = 65_536
MAX_ROUNDING = 10_000


@dataclass(frozen=True, slots=True)
class DeltaShaping:
    """How the deltas of an answer are shaped; by default they are not.

    Attributes:
        cadence: seconds. Each sample gets one delta at each multiple of it after Started, with or without new tokens,
            until all of them have ended; 0 sends tokens as they come.
        padding: bytes. Each message is filled up to a multiple of it with random bytes; 0 fills up none. With a cadence
            also the size of a delta: tokens beyond it wait for the next one.
        rounding: with a cadence, empty deltas fill up their number to a multiple of this.

    Raises:
        InvalidValueError: a value is outside its range. Its field is the name of the attribute.
    """

    cadence: float = 0.0
    padding: int = 0
    rounding: int = 1

    def __post_init__(self) -> None:
        if self.cadence and not MIN_CADENCE <= self.cadence <= MAX_CADENCE:
            allowed = f"it must be 0, or from {MIN_CADENCE:g} to {MAX_CADENCE:g} seconds"
            raise InvalidValueError("cadence", self.cadence, allowed)
        if not 0 <= self.padding <= MAX_PADDING:
            raise InvalidValueError("padding", self.padding, f"it must be from 0 to {MAX_PADDING} bytes")
        if not 1 <= self.rounding <= MAX_ROUNDING:
            raise InvalidValueError("rounding", self.rounding, f"it must be from 1 to {MAX_ROUNDING}")
        if self.rounding > 1 and not self.cadence:
            raise InvalidValueError("rounding", self.rounding, "it must be 1 without a cadence")

    @property
    def max_delta_bytes(self) -> float:
        """Of a delta at a cadence without its padding; infinity for no limit."""
        # One byte less than a multiple cannot be filled up: an entry of `padding` takes two.
        return max(self.padding - 2, 1) if self.padding else math.inf
