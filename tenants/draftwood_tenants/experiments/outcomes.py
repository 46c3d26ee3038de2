"""What is counted of a request, and the metrics that are ratios of these counts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

FIELDS = (
    "requests", "answered", "units", "erred_units", "tokens", "steps", "decode_seconds", "ttft_seconds",
    "draft_nodes", "accepted_tokens", "audited", "differing", "log_prompt_tokens", "day_sin", "day_cos", "timed",
)  # fmt: skip
"""The counts, in the order of the last axis of `Counts.sums`. Times, tokens and covariates are of answered requests;
`timed` counts those of them with a TTFT."""

COVARIATES = ("log_prompt_tokens", "day_sin", "day_cos")
"""Known before the arm is, so that no arm can change them; they take noise out of a comparison (CUPED)."""

_DAY = 86_400.0


def column(name: str) -> int:
    """The position of a count on the last axis."""
    return FIELDS.index(name)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished request.

    Attributes:
        arrived_at: seconds since the epoch.
        prompt_tokens: length of the prompt.
        erred: ended with an error that the caller did not cause. Its times and tokens are not counted.
        tokens: tokens written in decoding steps, the first one, which is the prefill's, not among them.
        steps: decoding steps.
        decode_seconds: time from the first token to the last.
        ttft_seconds: time from arrival to the first token; None where the process that counts cannot know it.
        draft_nodes, accepted_tokens: draft tokens that were verified and accepted.
    """

    arrived_at: float
    prompt_tokens: int
    erred: bool = False
    tokens: int = 0
    steps: int = 0
    decode_seconds: float = 0.0
    ttft_seconds: float | None = None
    draft_nodes: int = 0
    accepted_tokens: int = 0

    def counts(self, *, first: bool, first_error: bool) -> FloatArray:
        """float64[len(FIELDS)], audits not among them; `first` and `first_error`: it is the first request, or error, of
        its unit."""
        answered = not self.erred
        timed = answered and self.ttft_seconds is not None
        angle = 2.0 * math.pi * (self.arrived_at % _DAY) / _DAY
        times = (
            self.tokens,
            self.steps,
            self.decode_seconds,
            self.ttft_seconds or 0.0,
            self.draft_nodes,
            self.accepted_tokens,
        )
        covariates = (math.log1p(self.prompt_tokens), math.sin(angle), math.cos(angle))
        return np.array(
            [1, answered, first, first_error, *(answered * one for one in times), 0, 0]
            + [answered * one for one in covariates]
            + [timed],
            np.float64,
        )


@dataclass(frozen=True, slots=True)
class Metric:
    """A sum of one count over the sum of another.

    Attributes:
        title: what a reader calls it.
        key: what programs call it, in reports; never changes.
        more_is_better: whether an arm with a larger value is the better one.
    """

    title: str
    key: str
    numerator: str
    denominator: str
    more_is_better: bool = False


TIME_PER_TOKEN = Metric("decode time per token", "decode_seconds_per_token", "decode_seconds", "tokens")
TTFT = Metric("mean time to first token", "ttft_seconds_mean", "ttft_seconds", "timed")
TOKENS_PER_STEP = Metric("tokens per step", "tokens_per_step", "tokens", "steps", more_is_better=True)
NODES_PER_ACCEPTED = Metric(
    "draft nodes per accepted token", "draft_nodes_per_accepted_token", "draft_nodes", "accepted_tokens"
)
METRICS = (TIME_PER_TOKEN, TTFT, TOKENS_PER_STEP, NODES_PER_ACCEPTED)
"""The first one decides an experiment; the others explain it."""
