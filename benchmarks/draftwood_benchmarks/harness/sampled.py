"""How sampled answers are sampled in benchmarks."""

from __future__ import annotations

from typing import NamedTuple


class Sampled(NamedTuple):
    """As in `SamplingParams`, in its order."""

    temperature: float = 0.6
    top_k: int = 20
    top_p: float = 0.95


SAMPLED = Sampled()
"""What models of today recommend in their generation config."""
