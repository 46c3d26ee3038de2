"""Memory at fixed addresses: pages of keys and values, and the arrays of a step, which one copy fills."""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt
import torch

from draftwood_model_runner.runners.base import KVShape, StepBatch
from draftwood_model_runner.runners.cuda.device import DeviceBuffer, launch, power_of_2
from draftwood_model_runner.runners.cuda.kernels.attention import move_kv
from draftwood_model_runner.runners.cuda.tiling import Tiles
from draftwood_model_runner.runners.machine import allocated, by_layer, bytes_per_token
from draftwood_model_runner.sampling.metadata import SamplingMetadata
from draftwood_strategies.arrays import Int32Array

PAGE_SIZE = 16
"""Tokens of a page, vLLM's default: small, so that most of a short common prefix is in full pages."""


class FeatureShape(NamedTuple):
    """What a model shows to draft heads; or what a head is given, and hands on.

    Attributes:
        layers: whose inputs a step shows, see `noted_features`.
        shown: numbers of them, of each token; of a head of each one that needs logits.
        given: numbers of hidden states that a head is given of each token; 0 for a model.
        dtype: of what is shown.
    """

    layers: tuple[int, ...] = ()
    shown: int = 0
    given: int = 0
    dtype: torch.dtype = torch.float32


NO_FEATURES = FeatureShape()


class KVPages:
    """The pages; `scheduling.kv_pool.KVPool` decides what is in them.

    Attributes:
        pages: their number.
        layers: by number of each layer that attends [page, kv_head, PAGE_SIZE, key_dim + value_dim], the key of a token
            before its value.
        by_shape: the same, for each shape all of its layers: [layer, page, kv_head, PAGE_SIZE, key_dim + value_dim].

    Args:
        tokens: capacity, rounded up to full pages.
        numbers: of the layers; None if all attend.

    Raises:
        InvalidValueError: the device has no memory for it.
    """

    def __init__(
        self,
        shapes: tuple[KVShape, ...],
        dtype: torch.dtype,
        device: torch.device,
        tokens: int,
        numbers: tuple[int, ...] | None = None,
    ) -> None:
        self.pages = -(-tokens // PAGE_SIZE)

        def empty(shape: KVShape, layers: int) -> torch.Tensor:
            sizes = (layers, self.pages, shape.kv_heads, PAGE_SIZE, shape.key_dim + shape.value_dim)
            return torch.zeros(sizes, dtype=dtype, device=device)

        self.by_shape = allocated(shapes, tokens, bytes_per_token(shapes, dtype.itemsize), empty)
        self.layers: dict[int, torch.Tensor] = dict(
            zip(range(len(shapes)) if numbers is None else numbers, by_layer(shapes, self.by_shape), strict=True)
        )

    def move(self, moves: torch.Tensor, offsets: torch.Tensor, counts: torch.Tensor) -> None:
        """Moves entries in every layer.

        Args:
            moves: int64[m, 2], source and target slots.
            offsets: int32[n or more], the first move of each sequence.
            counts: int32[n], how many moves it has.
        """
        for shape, memory in self.by_shape.items():
            width = shape.key_dim + shape.value_dim
            launch(
                move_kv,
                (memory.shape[0], shape.kv_heads, counts.shape[0]),
                *(memory, moves, offsets, counts, memory.stride(0)),
                KV_HEADS=shape.kv_heads,
                WIDTH=width,
                BLOCK=power_of_2(width),
                PAGE_SIZE=PAGE_SIZE,
            )


class StepArrays:
    """The inputs of a step, for at most `tokens` tokens. What the batch does not fill is padding, which no token sees.

    Attributes:
        buffer: all of them, on the device.
        tokens, positions, prefixes: int32[tokens], on the device.
        parents: int32[tokens]: for a node of a draft tree the token of the step that it hangs from, else -1.
        slots: int64[tokens]; -1 for padding.
        token_parts: int32[tokens, 5]; 0 parts for padding.
        ancestor_bitmask: int64[tokens, words].
        paths: int32[tokens, levels].
        logit_rows: int32[tokens], the token that each row of logits follows.
        logit_offsets: int32[tokens + 1], the rows of logits of each batch row.
        kinds: int32[tokens]: for each batch row, who chooses its tokens.
        row_count, part_count: int32[1], rows of logits that are not padding, and parts of attention.
        parts: int32[most_parts, 8].
        pages: int32[pages], the page tables of all rows.

    Args:
        tokens: capacity in tokens.
        words: of the ancestor bitmask of a token.
        parts: in parts of attention.
        pages: in entries of page tables.
        levels: of draft trees, in exact mode; else 0.
    """

    def __init__(self, tokens: int, words: int, parts: int, pages: int, device: torch.device, levels: int = 0) -> None:
        self.capacity, self.page_capacity, self.word_capacity, self.part_capacity = tokens, pages, words, parts
        self.levels = levels
        self.buffer = DeviceBuffer(
            {
                "tokens": (np.int32, (tokens,)),
                "positions": (np.int32, (tokens,)),
                "prefixes": (np.int32, (tokens,)),
                "parents": (np.int32, (tokens,)),
                "slots": (np.int64, (tokens,)),
                "token_parts": (np.int32, (tokens, 5)),
                "ancestor_bitmask": (np.int64, (tokens, words)),
                "paths": (np.int32, (tokens, levels)),
                "logit_rows": (np.int32, (tokens,)),
                "logit_offsets": (np.int32, (tokens + 1,)),
                "kinds": (np.int32, (tokens,)),
                "row_count": (np.int32, (1,)),
                "part_count": (np.int32, (1,)),
                "parts": (np.int32, (parts, 8)),
                "pages": (np.int32, (pages,)),
            },
            device,
            pieces=2,  # a step is filled in while the one before is in flight
        )

    def __getattr__(self, name: str) -> torch.Tensor:
        return self.buffer[name]

    def fits(self, batch: StepBatch, tiles: Tiles) -> bool:
        """Whether a step can be filled in."""
        return (
            batch.size <= self.capacity
            and batch.block_table.size <= self.page_capacity
            and tiles.ancestor_bitmask.shape[1] <= self.word_capacity
            and tiles.parts.shape[0] <= self.part_capacity
        )

    def fill(self, batch: StepBatch, tiles: Tiles, padded: int, sampling: SamplingMetadata | None = None) -> None:
        """Copies a step to the device, where it is in place for what is launched afterwards on the current stream.

        Args:
            padded: tokens and rows of logits that the kernels will compute.
        """
        self.buffer.swap()
        host, n, wanted = self.buffer.host, batch.size, batch.logit_rows.size
        for name, values in (
            ("tokens", batch.tokens),
            ("positions", batch.positions),
            ("token_parts", tiles.token_parts),
        ):
            host[name][:n], host[name][n:padded] = values, 0
        host["logit_rows"][:wanted], host["logit_rows"][wanted:padded] = batch.logit_rows, 0
        host["slots"][n:padded] = -1
        _place(
            batch.cu_seqlens,
            batch.context_lens,
            batch.cu_blocks,
            batch.block_table,
            batch.parents,
            batch.logit_rows,
            host["slots"],
            host["parents"],
            host["logit_offsets"],
        )
        host["prefixes"][:n] = tiles.prefixes
        host["ancestor_bitmask"][:n, : tiles.ancestor_bitmask.shape[1]] = tiles.ancestor_bitmask
        if tiles.paths is not None:
            host["paths"][:n] = tiles.paths
        host["parts"][: tiles.parts.shape[0]] = tiles.parts
        host["part_count"][0], host["row_count"][0] = tiles.parts.shape[0], wanted
        if sampling is not None:
            host["kinds"][: batch.rows] = sampling.kinds
        pages = host["pages"]
        pages[: batch.block_table.size] = batch.block_table
        self.buffer.send(until="pages", size=batch.block_table.size)


@numba.njit(cache=True, nogil=True)
def _place(
    cu_seqlens: Int32Array,
    context_lens: Int32Array,
    cu_blocks: Int32Array,
    block_table: Int32Array,
    parents: Int32Array,
    logit_rows: Int32Array,
    slots: npt.NDArray[np.int64],
    node_parents: Int32Array,
    logit_offsets: Int32Array,
) -> None:
    """Sets the last three, see `StepArrays`, from the arrays of a `StepBatch`. In NumPy it took 50 us."""
    row_of_logits: int = 0
    for row in range(context_lens.shape[0]):
        begin, end = cu_seqlens[row], cu_seqlens[row + 1]
        logit_offsets[row] = row_of_logits
        has_logits = row_of_logits < logit_rows.shape[0] and logit_rows[row_of_logits] < end
        root = logit_rows[row_of_logits] if has_logits else end
        for token in range(begin, end):
            entry = context_lens[row] + token - begin
            page = np.int64(block_table[cu_blocks[row] + entry // PAGE_SIZE])
            slots[token] = page * PAGE_SIZE + entry % PAGE_SIZE
            node_parents[token] = parents[token] + begin if token > root else -1
        while row_of_logits < logit_rows.shape[0] and logit_rows[row_of_logits] < end:
            row_of_logits += 1
    logit_offsets[context_lens.shape[0]] = row_of_logits
