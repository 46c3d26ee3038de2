"""A `StepBatch` on its way through the model: where the entries of its rows are, and what their tokens attend to."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import torch

from draftwood_model_runner.runners.base import StepBatch
from draftwood_model_runner.runners.torch.exact_attention import block_of, pieces
from draftwood_model_runner.runners.torch.kv_cache import PAGE_SIZE, KVCache, StepEntries
from draftwood_model_runner.runners.torch.machine import kernel_width
from draftwood_strategies.draft import Float32Array, Int32Array

MASK_NUMBERS = 1 << 24
"""Numbers of the masks that are kept during a step, all together, and of any other one: 64 MB each in float32. A
chunk of 512 tokens has a mask of one piece up to a context of 32,000; several take a tenth longer in a tiny model,
where attention is fast."""


class TorchBatch:
    """A `StepBatch` on its way through the model: its KV entries, and the masks of its rows as layers need them."""

    def __init__(self, batch: StepBatch, kv: KVCache) -> None:
        self.batch = batch
        self.layout = kv.layout
        self.cu_seqlens: list[int] = batch.cu_seqlens.tolist()
        self.context_lens: list[int] = batch.context_lens.tolist()
        self.entries = StepEntries(kv, batch)
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}
        self._own_masks: dict[tuple[int, int | None], torch.Tensor] = {}
        self._mask_numbers = 0
        self._pieces: dict[int, list[tuple[slice, int]]] = {}
        self._calls = 0

    def next_call(self) -> int:
        """The number of this call of attention in the step: whose keys and values it reads and writes."""
        self._calls += 1
        return self._calls - 1

    def inputs(self) -> dict[str, Any]:
        """Arguments of `logits_of_rows`: input_ids int64[1, T], position_ids int64[1, T], rows int64[R].

        On a CPU, T and R are rounded up so that kernels are compiled for few widths. The tokens that are added at the
        end take part in no attention.
        """
        batch, device = self.batch, self.layout.device
        tokens, positions, rows = batch.tokens, batch.positions, batch.logit_rows
        if device.type == "cpu":
            tokens, positions, rows = _padded(tokens), _padded(positions), _padded(rows)
        return {
            "input_ids": _to_device(tokens, device)[None],
            "position_ids": _to_device(positions, device)[None],
            "rows": _to_device(rows, device),
            "use_cache": False,
        }

    def pieces(self, row: int) -> list[tuple[slice, int]]:
        """Runs of tokens of a batch row for `attend_exactly`, each with the position of its first."""
        if row not in self._pieces:
            positions = self.batch.positions[self.cu_seqlens[row] : self.cu_seqlens[row + 1]]
            self._pieces[row] = [(run, int(positions[run.start])) for run in pieces(positions)]
        return self._pieces[row]

    def first_entry(self, row: int, window: int | None) -> int:
        """The first entry of the first page that some token of a batch row attends to."""
        context = self.context_lens[row]
        return first_entry(block_of(context) if self.layout.exact else context, window)

    def query_pieces(self, row: int, window: int | None) -> list[slice]:
        """The tokens of a batch row, in as many pieces as masks of at most `MASK_NUMBERS` numbers ask for."""
        size = self.cu_seqlens[row + 1] - self.cu_seqlens[row]
        rows = max(1, MASK_NUMBERS // (self.context_lens[row] - self.first_entry(row, window) + size))
        return [slice(begin, min(begin + rows, size)) for begin in range(0, size, rows)]

    def mask(self, row: int, window: int | None, queries: slice) -> torch.Tensor | None:
        """[q, context - first_entry + T_s] of some tokens of a batch row, 0 where a token attends and -inf elsewhere;
        None if all attend to all.

        Masks are kept for all layers, up to `MASK_NUMBERS` numbers in a step; others are computed for each layer.

        Args:
            window: a token attends to the last `window` positions, its own included; None for all.
        """
        size, context = self.cu_seqlens[row + 1] - self.cu_seqlens[row], self.context_lens[row]
        if window is not None and window > context + size:
            window = None  # wider than any position
        context -= self.first_entry(row, window)
        if size == 1 and window is None:
            return None
        if (row, window) not in self._masks:
            numbers = size * (context + size)
            if self._mask_numbers + numbers > MASK_NUMBERS:
                return self._assembled(row, window, queries)
            self._mask_numbers += numbers
            self._masks[row, window] = self._filled(row, window, context)
        kept = self._masks[row, window]
        return kept if queries.stop - queries.start == size else kept[queries]

    def _filled(self, row: int, window: int | None, context: int) -> torch.Tensor:
        """[T_s, context + T_s] over the last `context` committed tokens and the row's own."""
        tokens = slice(self.cu_seqlens[row], self.cu_seqlens[row + 1])
        depths = self.batch.positions[tokens] - np.int32(self.context_lens[row])
        mask = np.empty((depths.size, context + depths.size), np.float32)
        _fill_mask(self.batch.parents[tokens], depths, context, 2**31 - 1 if window is None else window, mask)
        return torch.from_numpy(mask).to(device=self.layout.device, dtype=self.layout.dtype)

    def _assembled(self, row: int, window: int | None, queries: slice) -> torch.Tensor:
        """As `mask`, on the device."""
        if (row, window) not in self._own_masks:
            self._own_masks[row, window] = self._filled(row, window, 0)
        own, first = self._own_masks[row, window][queries], self.first_entry(row, window)
        context = self.context_lens[row] - first
        mask = own.new_zeros(own.shape[0], context + own.shape[1])
        mask[:, context:] = own
        if window is not None:
            begin = self.cu_seqlens[row]
            positions = self.batch.positions[begin + queries.start : begin + queries.stop]
            oldest = _to_device(positions, mask.device) - window + 1 - first
            mask[:, :context].masked_fill_(torch.arange(context, device=mask.device) < oldest[:, None], -math.inf)
        return mask


def first_entry(position: int, window: int | None) -> int:
    """The first entry of the page with the first one that a token at a position attends to."""
    return 0 if window is None else max(0, position - window + 1) // PAGE_SIZE * PAGE_SIZE


def _padded(array: Int32Array) -> Int32Array:
    """int32[n] with zeros at the end, up to the next width that kernels are compiled for."""
    missing = kernel_width(array.size) - array.size
    return np.concatenate([array, np.zeros(missing, np.int32)]) if missing else array


def _to_device(array: Int32Array, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int64)).to(device)


@numba.njit(cache=True, nogil=True)
def _fill_mask(parents: Int32Array, depths: Int32Array, context: int, window: int, mask: Float32Array) -> None:
    for i in range(parents.shape[0]):
        oldest = context + depths[i] - window + 1
        for j in range(context):
            mask[i, j] = 0.0 if j >= oldest else -np.inf
        for j in range(parents.shape[0]):
            mask[i, context + j] = -np.inf
        j = i
        while j >= 0 and context + depths[j] >= oldest:
            mask[i, context + j] = 0.0
            j = parents[j]
