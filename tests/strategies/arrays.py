"""Token ids as the arrays that strategies take."""

from __future__ import annotations

import numpy as np

from draftwood_strategies.arrays import Int32Array


def ids(*tokens: int) -> Int32Array:
    return np.array(tokens, np.int32)
