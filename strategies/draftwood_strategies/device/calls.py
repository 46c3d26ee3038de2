"""Calls of the kernels, on the current stream."""

from __future__ import annotations

from typing import Any

from draftwood_strategies.device.arena import ADDED, MEMORY, RECORDED, TEXT, WEIGHTS_AT_ONCE, Layout, Region
from draftwood_strategies.device.launching import launch
from draftwood_strategies.trie.phrase_index import TOKENS_PER_BLOCK

_MOST_RUNS = {TEXT: 1, MEMORY: 256, RECORDED: 16}
"""Runs that a program takes at a time. With few runs, each is written in few pieces. Not tuned."""


WARPS = 8
"""Of programs that draft and update_weights: with 4 a draft spills 2.3 kB of its registers."""


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
    """Appends runs of tokens to texts or memories.

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


def draft(
    arena: Any,
    layout: Layout,
    rows: Any,
    budgets: Any,
    branch_length: int,
    out: tuple[Any, Any, Any, Any],
    chains: bool,
) -> None:
    """Drafts for rows whose outputs have begun.

    Args:
        rows, budgets: int32[b], each row once, negative for none, and the most nodes of its draft.
        branch_length: the deepest node.
        out: tokens, parents, scores and sizes, int32[b, n], int32[b, n], float32[b, n] and int32[b].
        chains: one path of each draft, without parents; a budget is its length.
    """
    if rows.shape[0]:
        launch(
            "drafting",
            "draft",
            (rows.shape[0],),
            *(arena, rows, budgets, *out, out[0].shape[1], branch_length),
            SCRATCH=layout.scratch,
            SCRATCH_SIZE=layout.scratch_size,
            CHAINS_ONLY=int(chains),
            num_warps=WARPS,
            **_constants(layout),
        )


def learn(arena: Any, layout: Layout, rows: Any, tokens: Any, counts: Any, branch_length: int) -> None:
    """Learns from the rows' latest drafts; their texts do not have the accepted tokens yet.

    Args:
        rows: int32[b], each row once, negative for none.
        tokens: int32[b, k], of which row `rows[r]` accepted the first `counts[r]`.
        counts: int32[b].
        branch_length: the deepest node.
    """
    b, k = tokens.shape
    if not b:
        return
    launch(
        "learning",
        "learn",
        (b,),
        *(arena, rows, tokens, counts, k, branch_length),
        MISSED=layout.misses,
        **_constants(layout),
    )
    launch(
        "learning",
        "update_weights",
        (b, 1 - (-ADDED // WEIGHTS_AT_ONCE)),
        *(arena, rows, b),
        WEIGHTS=layout.weights,
        STATES=layout.states,
        MISSED=layout.misses,
        WEIGHTS_SIZE=layout.weights_size,
        RUNS=64,
        num_warps=WARPS,
    )


def _constants(layout: Layout) -> dict[str, int]:
    return {
        "MEMORIES": layout.memories,
        "WEIGHTS": layout.weights,
        "STATES": layout.states,
        "ROOTS": layout.roots,
        "DRAFTS": layout.drafts,
        "TEXT_BLOCKS": layout.text.blocks,
        "TEXT_BUCKETS": layout.text.buckets,
        "TEXT_SIZE": layout.text.size,
        "MEMORY_BLOCKS": layout.memory.blocks,
        "MEMORY_BUCKETS": layout.memory.buckets,
        "MEMORY_SIZE": layout.memory.size,
        "WEIGHTS_SIZE": layout.weights_size,
        "MOST": layout.sizes.nodes,
        "TENANTS": layout.sizes.tenants,
    }


def _runs_at_a_time(region: Region, runs: int, most: int) -> int:
    """A power of two; each of them may claim a block, and all together half of the region's."""
    return min(most, 1 << (runs - 1).bit_length(), 1 << ((region.blocks // 2).bit_length() - 1))
