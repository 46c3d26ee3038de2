"""Threads for work on rows of logits, which waits for memory more than for the interpreter. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import TypeVar

LEAST_NUMBERS = 1 << 19
"""Logits in all rows from which on threads pay: 2 MiB take one thread 50 us, a call in another thread 30."""
_MOST = 16
"""More threads than this wait for each other."""

Result = TypeVar("Result")


def in_threads(calls: Sequence[Callable[[], Result]], threads: int) -> list[Result]:
    """What the calls return, in their order; they run in this thread and in up to `threads - 1` others.

    They should be few, about as many as threads: handing one over takes some 30 us. Raises what the first one that
    fails raised, once all have ended.
    """
    if threads < 2 or len(calls) < 2:
        return [call() for call in calls]
    others = [_pool(min(threads, _MOST) - 1).submit(call) for call in calls[1:]]
    try:
        first = calls[0]()
    finally:
        for other in others:
            other.exception()
    return [first, *(other.result() for other in others)]


def parts(count: int, threads: int) -> list[range]:
    """0 to `count` in as many ranges as threads, of about equal size, none empty."""
    wanted = max(1, min(count, threads, _MOST))
    edges = [count * i // wanted for i in range(wanted + 1)]
    return [range(begin, end) for begin, end in pairwise(edges)]


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Kept for the life of the process: it is used in every step."""
    return ThreadPoolExecutor(threads, thread_name_prefix="rows")
