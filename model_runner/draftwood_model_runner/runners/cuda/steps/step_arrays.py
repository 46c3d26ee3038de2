"""The arrays of a step on the device: one buffer at a fixed address, filled by one copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from draftwood_model_runner.runners.base import StepBatch
from draftwood_model_runner.runners.cuda.device.buffer import DeviceBuffer
from draftwood_model_runner.runners.cuda.kv_cache import PAGE_SIZE
from draftwood_model_runner.runners.cuda.steps.tiling import Tiles
from draftwood_model_runner.sampling.metadata import SamplingMetadata
from draftwood_strategies.draft import Int32Array


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
        logit_begins: int32[tokens + 1], the rows of logits of each batch row.
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
                "logit_begins": (np.int32, (tokens + 1,)),
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
        self.buffer.turn()
        host, n, rows, wanted = self.buffer.host, batch.size, batch.rows, batch.logit_rows.size
        for name, values in (
            ("tokens", batch.tokens),
            ("positions", batch.positions),
            ("token_parts", tiles.token_parts),
        ):
            host[name][:n], host[name][n:padded] = values, 0
        host["logit_rows"][:wanted], host["logit_rows"][wanted:padded] = batch.logit_rows, 0
        host["slots"][:n], host["slots"][n:padded] = batch.slot_mapping(PAGE_SIZE), -1
        host["prefixes"][:n] = tiles.prefixes
        host["ancestor_bitmask"][:n, : tiles.ancestor_bitmask.shape[1]] = tiles.ancestor_bitmask
        if tiles.paths is not None:
            host["paths"][:n] = tiles.paths
        host["parts"][: tiles.parts.shape[0]] = tiles.parts
        host["part_count"][0], host["row_count"][0] = tiles.parts.shape[0], wanted
        if sampling is not None:
            host["kinds"][:rows] = sampling.kinds
            begins = host["logit_begins"][: rows + 1]
            begins[:] = np.searchsorted(batch.logit_rows, batch.cu_seqlens)
            host["parents"][:n] = _node_parents(batch, begins)
        pages = host["pages"]
        pages[: batch.block_table.size] = batch.block_table
        self.buffer.send(until="pages", size=batch.block_table.size)


def _node_parents(batch: StepBatch, logit_begins: npt.NDArray[Any]) -> Int32Array:
    """int32[T]: for each token behind the first of its batch row that needs logits the token of the step that it
    follows, else -1."""
    sizes = np.diff(batch.cu_seqlens)
    begins = np.repeat(batch.cu_seqlens[:-1], sizes)
    first = logit_begins[:-1]
    has_logits = first < logit_begins[1:]
    roots = np.where(has_logits, batch.logit_rows[np.minimum(first, batch.logit_rows.size - 1)], batch.cu_seqlens[1:])
    is_node = np.arange(batch.size) > np.repeat(roots, sizes)
    return np.where(is_node, batch.parents + begins, -1).astype(np.int32)
