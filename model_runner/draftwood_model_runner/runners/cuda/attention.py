"""The attention function: writes keys and values into pages, and lets the kernels attend to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from draftwood_model_runner.runners.base import KVShape
from draftwood_model_runner.runners.cuda.device import MERGED_PARTS, WORD, Machine, launch, power_of_2
from draftwood_model_runner.runners.cuda.kernels.attention import attention_parts, merge_parts, write_kv
from draftwood_model_runner.runners.cuda.memory import PAGE_SIZE, KVPages, StepArrays
from draftwood_model_runner.runners.cuda.tiling import Tiles
from draftwood_model_runner.runners.model_calls import AttentionHook

_NO_WINDOW = 2**30
"""Positions: more than any context."""
_FEW_ROWS, _LARGE_HEAD, _CONSUMER_BLACKWELL = 16, 128, 120
_LARGE_HEAD_KEYS = {torch.float32: 16}
"""Entries that a program reads at a time where heads are larger than `_LARGE_HEAD`; 32 in other dtypes, elsewhere
`WORD`. They fit the 99 KiB of compute capability 8.6, 8.9 and 12.0, see `test_compiled.py`."""


def blocks_of(size: int) -> int:
    """The power of 2 that holds a head's numbers, at least what `tl.dot` multiplies."""
    return max(16, power_of_2(size))


class Scratch:
    """What parts of attention leave for their merge; layers use it one after the other.

    Args:
        rows: capacity in rows of all parts.
    """

    def __init__(self, shapes: tuple[KVShape, ...], rows: int, device: torch.device) -> None:
        self._rows = rows
        heads = max(shape.kv_heads for shape in shapes)
        widest = max(shape.kv_heads * blocks_of(shape.value_dim) for shape in shapes)
        self.sums = torch.empty(rows * widest, dtype=torch.float32, device=device)
        self.maxima, self.totals = torch.empty((2, rows * heads), dtype=torch.float32, device=device)

    def fits(self, tiles: Tiles, rows: int) -> bool:
        """Whether the parts of a step have room, with so many rows each."""
        return bool(tiles.parts.shape[0] * rows <= self._rows)


@dataclass(frozen=True, eq=False, slots=True)
class AttentionStep:
    """What the layers of a step need.

    Attributes:
        rows: of a tile: its tokens, and for each of them the heads of a group.
    """

    kv: KVPages
    arrays: StepArrays
    scratch: Scratch
    machine: Machine
    rows: int


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over the flat batch of `STEP`.

    Args:
        query: [1, head, T, key_dim]; key: [1, kv_head, T, key_dim]; value: [1, kv_head, T, value_dim].
        attention_mask: None; what a token sees is in the step.
        sliding_window, softcap, s_aux: window in tokens, cap of the scores (Gemma 2), attention sinks
            [head] (gpt-oss), where the model has them.

    Returns:
        [1, T, head, value_dim] and no weights.
    """
    step, layer = STEP.get(), int(module.layer_idx)  # type: ignore[arg-type]
    arrays, kv = step.arrays, step.kv.layers[layer]
    heads, tokens, key_dim = query.shape[1:]
    kv_heads, value_dim = value.shape[1], value.shape[3]
    query, key, value = (with_rows(tensor) for tensor in (query, key, value))
    launch(
        write_kv,
        (tokens,),
        *(key, value, kv, arrays.slots),
        *(key.stride(2), key.stride(1), value.stride(2), value.stride(1)),
        KV_HEADS=kv_heads,
        HEADS_BLOCK=power_of_2(kv_heads),
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK=blocks_of(max(key_dim, value_dim)),
        PAGE_SIZE=PAGE_SIZE,
    )
    scratch = step.scratch
    launch(
        attention_parts,
        (step.machine.programs,),
        *(query, kv, scratch.sums, scratch.maxima, scratch.totals),
        *(arrays.parts, arrays.part_count, arrays.pages, arrays.prefixes, arrays.positions, arrays.ancestor_bitmask),
        arrays.paths,
        key_dim**-0.5 if scaling is None else scaling,
        softcap or 0.0,
        _NO_WINDOW if sliding_window is None else sliding_window,
        *(query.stride(2), query.stride(1)),
        GROUP=heads // kv_heads,
        KV_HEADS=kv_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEY_BLOCK=blocks_of(key_dim),
        VALUE_BLOCK=blocks_of(value_dim),
        PAGE_SIZE=PAGE_SIZE,
        WORDS=arrays.word_capacity,
        LEVELS=arrays.levels,
        ROWS=step.rows,
        KEYS=_keys(max(key_dim, value_dim), query.dtype),
        CAPPED=softcap is not None,
        WINDOWED=sliding_window is not None,
        num_warps=_warps(step.rows, max(key_dim, value_dim), query.dtype, step.machine.capability),
    )
    output = query.new_empty((tokens, heads, value_dim))
    launch(
        merge_parts,
        (tokens, heads),
        *(output, scratch.sums, scratch.maxima, scratch.totals, arrays.token_parts),
        output if s_aux is None else s_aux,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        VALUE_DIM=value_dim,
        VALUE_BLOCK=blocks_of(value_dim),
        ROWS=step.rows,
        PARTS=MERGED_PARTS,
        WITH_SINKS=s_aux is not None,
        num_warps=_merging_warps(blocks_of(value_dim)),
    )
    return output[None], None


def _warps(rows: int, head_size: int, dtype: torch.dtype, capability: int) -> int:
    """Warps of a part of attention: so many that its sums fit their registers, see `test_compiled.py`. With few rows
    and heads of 64 numbers two took 17.5 us on an H200 where four took 19.5."""
    if dtype == torch.float32:
        return 8 if head_size >= _LARGE_HEAD else 4
    if rows <= _FEW_ROWS and head_size <= _LARGE_HEAD // 2:
        return 2
    four_warps = _LARGE_HEAD // 2 if capability >= _CONSUMER_BLACKWELL else _LARGE_HEAD
    return 8 if rows > _FEW_ROWS and head_size > four_warps else 4


def _merging_warps(value_block: int) -> int:
    """Warps of a merge: one holds the parts of a head of 128 numbers in 64 registers a thread, and sums by itself."""
    return max(1, MERGED_PARTS * value_block // 2048)


def _keys(head_size: int, dtype: torch.dtype) -> int:
    """Entries that a part of attention reads at a time; divides `WORD`."""
    return _LARGE_HEAD_KEYS.get(dtype, WORD // 2) if head_size > _LARGE_HEAD else WORD


def with_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the numbers of a head side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


STEP = AttentionHook[AttentionStep]("draftwood_cuda", paged_attention)
