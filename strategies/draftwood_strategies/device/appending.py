"""Calls of the kernel `append`."""

from __future__ import annotations

from typing import Any

from draftwood_strategies.device.arena import MEMORY, RECORDED, TEXT, Layout, Region
from draftwood_strategies.device.launching import launch
from draftwood_strategies.trie.phrase_index import TOKENS_PER_BLOCK

_MOST_RUNS = {TEXT: 1, MEMORY: 256, RECORDED: 16}
"""Runs that a program takes at a time. With few runs, each is written in few pieces. Not tuned."""


def append(
    arena: Any,
    layout: Layout,
    kind: int,
    rows: Any,
    tokens: Any,
    begins: Any,
    counts: Any,
    *,
    stride: int = 1,
    region: int = 0,
    counted: bool = False,
) -> None:
    """Appends runs of tokens to texts or memories, on the current stream.

    Args:
        arena: int32[layout.size].
        kind: `TEXT`, `MEMORY` or `RECORDED`.
        rows: int32[n], the row of each run, negative for none; for `RECORDED` the numbers of the new sequences.
        tokens: int32[...]; run r has the `counts[r]` from number `begins[r] * stride` on.
        begins, counts: int32[n].
        region: that of the tenant, for `RECORDED`.
        counted: the memory has the tokens that are added to the texts; for `TEXT`.
    """
    n = rows.shape[0]
    if n == 0:
        return
    into = layout.text if kind == TEXT else layout.memory
    runs = _runs_at_a_time(into, n, _MOST_RUNS[kind])
    launch(
        "appending",
        "append",
        (1 if kind == RECORDED else n,),
        arena,
        rows,
        tokens,
        begins,
        counts,
        n,
        stride,
        region,
        REGIONS=0 if kind == TEXT else layout.memories,
        REGION_SIZE=into.size,
        BLOCKS=into.blocks,
        BUCKETS=into.buckets,
        STATES=layout.states,
        SCRATCH=layout.scratch,
        SCRATCH_SIZE=layout.scratch_size,
        KIND=kind,
        COUNTED=int(counted and kind == TEXT),
        RUNS=runs,
        PIECE=into.blocks // 2 // runs * TOKENS_PER_BLOCK,
    )


def _runs_at_a_time(region: Region, runs: int, most: int) -> int:
    """A power of two; each of them may claim a block, and all together half of the region's."""
    return min(most, 1 << (runs - 1).bit_length(), 1 << ((region.blocks // 2).bit_length() - 1))
