"""Named tuples on their way into compiled code."""

from __future__ import annotations

import subprocess
import sys
from typing import NamedTuple

import numpy as np

from draftwood_strategies.draft import DraftTree
from draftwood_strategies.native import Int32Array, compiled, flattened


class Pair(NamedTuple):
    first: Int32Array
    second: Int32Array


class Nested(NamedTuple):
    pair: Pair
    third: Int32Array


@flattened
@compiled
def digits(nested: Nested, factor: int, pair: Pair) -> int:
    """All arguments in one number."""
    found = factor
    for part in (nested.pair.first, nested.pair.second, nested.third, pair.first, pair.second):
        found = 10 * found + int(part[0])
    return found


def test_every_field_arrives_where_it_belongs() -> None:
    one, two, three, four, five = (np.array([digit], np.int32) for digit in range(1, 6))
    assert digits(Nested(Pair(one, two), three), 9, Pair(four, five)) == 912345
    assert digits(factor=9, pair=Pair(four, five), nested=Nested(Pair(one, two), three)) == 912345
    assert digits.__doc__ == "All arguments in one number."


def test_another_process_finds_it_compiled() -> None:
    DraftTree.of([1, 2])
    program = (
        "from draftwood_strategies import draft; draft.DraftTree.of([1, 2]);"
        "stats = draft._first_violation.__globals__['_violation_in_flattened'].stats;"
        "print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.split() == ["1", "0"]
