"""Calls of the kernels, on the current stream."""

from __future__ import annotations

from typing import Any, NamedTuple

from draftwood_strategies.device.arena import (
    ADDED,
    MEMORY,
    NODES_AT_ONCE,
    RECORDED,
    TEXT,
    WEIGHTS_AT_ONCE,
    Layout,
    Region,
)
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


class VerifiedTrees(NamedTuple):
    """Trees that steps have verified, on the device, one after the other.

    Attributes:
        tokens, parents: int32[n]; node 0 of a tree is its row's last token before the step. A parent is a node in these
            arrays, -1 for none. Other nodes without one are padding.
        top_tokens: int32[n, WIDTH or more], the most probable tokens after each node, best first, in rows that are
            `top_tokens.stride(0)` numbers apart.
        offsets: int32[t + 1], where each tree begins, and where the last one ends.
    """

    tokens: Any
    parents: Any
    top_tokens: Any
    offsets: Any


def mix(arena: Any, layout: Layout, model_table: Any, rows: Any, budgets: Any, out: tuple[Any, Any, Any, Any]) -> None:
    """Drafts of the mixture from the trie's drafts of this step, which rows without a trie have none of.

    Args:
        model_table: int32[r, successors.COLUMNS].
        rows: int32[b], each row once, negative for those that stay as `out` has them.
        budgets, out: as for `draft`.
    """
    launch(
        "mixing",
        "mix",
        (rows.shape[0],),
        *(arena, model_table, rows, budgets, *out, out[0].shape[1], model_table.shape[0]),
        DRAFTS=layout.drafts,
        SCRATCH=layout.scratch,
        SCRATCH_SIZE=layout.scratch_size,
        ROWS=layout.sizes.contexts,
        TENANTS=layout.sizes.tenants,
        num_warps=WARPS,
        **_constants_of_mixture(layout),
    )


def learn_mixture(
    arena: Any,
    layout: Layout,
    model_table: Any,
    rows: Any,
    tokens: Any,
    counts: Any,
    sources: Any,
    trees: VerifiedTrees,
) -> None:
    """The mixture learns from the rows' latest drafts and from what was verified, before the trie does.

    Args:
        model_table, rows: as for `mix`.
        tokens, counts: as for `learn`.
        sources: int32[b], of each row the number of its verified tree.
    """
    (b, k), nodes = tokens.shape, layout.sizes.nodes + 1
    constants = {
        "TARGETS": layout.targets_at,
        "HASHES": layout.hashes_at,
        "RUNS": 64,
        **_constants_of_mixture(layout),
    }
    grid = b, 1 - (-nodes // NODES_AT_ONCE)
    launch(
        "mixture_learning",
        "observe",
        grid,
        *(arena, model_table, rows, tokens, counts, sources, trees.tokens, trees.parents, trees.offsets),
        *(b, k, model_table.shape[0]),
        DRAFTS=layout.drafts,
        SCRATCH=layout.scratch,
        SCRATCH_SIZE=layout.scratch_size,
        ROWS=layout.sizes.contexts,
        num_warps=WARPS,
        **constants,
    )
    launch(
        "mixture_learning",
        "apply",
        grid,
        *(arena, rows, tokens, counts, sources, trees.parents, trees.top_tokens, trees.offsets),
        *(b, k, trees.top_tokens.stride(0)),
        num_warps=WARPS,
        **constants,
    )


def _constants_of_mixture(layout: Layout) -> dict[str, int]:
    return {
        "WEIGHTS": layout.weights,
        "STATES": layout.states,
        "MIXED": layout.mixed,
        "MIXTURE": layout.mixture,
        "TABLE": layout.table,
        "WEIGHTS_SIZE": layout.weights_size,
        "MIXED_SIZE": layout.mixed_size,
        "MOST": layout.sizes.nodes,
    }


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
