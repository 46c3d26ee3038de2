"""Attention of the torch runner: every node of every draft tree attends to its context and its own ancestors."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from draftwood_model_runner.runners.base import StepBatch
from draftwood_model_runner.runners.model_calls import AttentionHook
from draftwood_model_runner.runners.torch.exact_attention import attend_exactly, block_of, pieces
from draftwood_model_runner.runners.torch.kv_cache import PAGE_SIZE, KVCache, StepEntries
from draftwood_model_runner.runners.torch.latents import LatentProjection, latent_projection
from draftwood_model_runner.runners.torch.packed_linear import kernel_width
from draftwood_strategies.arrays import Float32Array, Int32Array

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
        """Arguments of `logits_of_rows`: input_ids int64[1, T], position_ids int64[1, T], rows int64[R]; of a head's
        step features float32[1, T, d] besides.

        On a CPU, T and R are rounded up so that kernels are compiled for few widths. The tokens that are added at the
        end take part in no attention.
        """
        batch, device = self.batch, self.layout.device
        tokens, positions, rows = batch.tokens, batch.positions, batch.logit_rows
        if device.type == "cpu":
            tokens, positions, rows = _padded(tokens), _padded(positions), _padded(rows)
        inputs = {
            "input_ids": _to_device(tokens, device)[None],
            "position_ids": _to_device(positions, device)[None],
            "rows": _to_device(rows, device),
            "use_cache": False,
        }
        if batch.features is not None:
            given = torch.from_numpy(batch.features).to(device)
            inputs["features"] = pad(given, (0, 0, 0, tokens.size - batch.size))[None]
        return inputs

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
        # Not the position alone, since a model that drafts may lack the first pages of a row.
        depths = self.batch.positions[tokens] - self.batch.positions[tokens.start]
        mask = np.empty((depths.size, context + depths.size), np.float32)
        _fill_mask(self.batch.parents[tokens], depths, context, 2**31 - 1 if window is None else window, mask)
        return torch.from_numpy(mask).to(device=self.layout.device, dtype=self.layout.dtype)

    def _assembled(self, row: int, window: int | None, queries: slice) -> torch.Tensor:
        """What `mask` returns, put together on the device."""
        if (row, window) not in self._own_masks:
            self._own_masks[row, window] = self._filled(row, window, 0)
        among_step, first = self._own_masks[row, window][queries], self.first_entry(row, window)
        context = self.context_lens[row] - first
        mask = among_step.new_zeros(among_step.shape[0], context + among_step.shape[1])
        mask[:, context:] = among_step
        if window is not None:
            begin = self.cu_seqlens[row]
            depths = self.batch.positions[begin + queries.start : begin + queries.stop] - self.batch.positions[begin]
            oldest = _to_device(depths, mask.device) + self.context_lens[row] - window + 1 - first
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


class _Scores(NamedTuple):
    """How a layer computes its scores: scaled, capped (Gemma 2), with sinks [head] in the softmax (gpt-oss)."""

    scaling: float | None
    softcap: float | None
    sinks: torch.Tensor | None


def tree_attention(
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
    """Attention over the flat batch of `BATCH`; writes the keys and values of the step into their pages.

    Args:
        query: [1, head, T, key_dim]; key: [1, kv_head, T, key_dim]; value: [1, kv_head, T, value_dim].
        attention_mask: None; the mask comes from the batch.
        sliding_window, softcap, s_aux: window in tokens, cap of the scores (Gemma 2), attention sinks
            [head] (gpt-oss), where the model has them.

    Returns:
        [1, T, head, value_dim] and no weights.
    """
    batch = BATCH.get()
    layer = batch.next_call()
    batch.entries.write(layer, key[0], value[0])
    scores, latent = _Scores(scaling, softcap, s_aux), latent_projection(module)
    outputs: list[torch.Tensor] = []
    for row in range(batch.batch.rows):
        of_row = query[:, :, batch.cu_seqlens[row] : batch.cu_seqlens[row + 1]]
        if batch.layout.exact:
            outputs += _attend_row_exactly(batch, layer, row, of_row, sliding_window, scores)
        else:
            outputs += _attend_row(batch, layer, row, of_row, sliding_window, scores, latent)
    padding = query.shape[2] - batch.cu_seqlens[-1]
    if padding:
        outputs.append(query.new_zeros(padding, *outputs[0].shape[1:]))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output[None].contiguous(), None


BATCH = AttentionHook[TorchBatch]("draftwood", tree_attention)


def _attend_row_exactly(
    batch: TorchBatch, layer: int, row: int, query: torch.Tensor, window: int | None, scores: _Scores
) -> list[torch.Tensor]:
    """The outputs [q, head, value_dim] of a batch row, piece by piece."""
    begin, context = batch.first_entry(row, window), batch.context_lens[row]
    keys, values = batch.entries.read(layer, row, begin)
    outputs = []
    for run, position in batch.pieces(row):
        mask = batch.mask(row, window, run)
        first = first_entry(block_of(position), window)  # the same with and without drafts
        behind, start = first - begin, context + run.start - first
        if mask is not None:
            mask = mask[:, behind : behind + start + run.stop - run.start]
        queries, seen, given = query[0, :, run], keys[:, behind:], values[:, behind:]
        outputs.append(attend_exactly(queries, seen, given, start, position, first, mask, *scores))
    return outputs


def _attend_row(
    batch: TorchBatch,
    layer: int,
    row: int,
    query: torch.Tensor,
    window: int | None,
    scores: _Scores,
    latent: LatentProjection | None,
) -> list[torch.Tensor]:
    """The outputs [q, head, value_dim] of a batch row, piece by piece.

    Args:
        latent: what is kept are latents, which it projects; None for keys and values.
    """
    begin, size = batch.first_entry(row, window), query.shape[2]
    last = batch.context_lens[row] + size - begin
    keys, values = (part[:, :last] for part in batch.entries.read(layer, row, begin))
    runs = batch.query_pieces(row, window)
    plain = scores.softcap is None and scores.sinks is None
    if latent is not None:
        if plain and latent.absorbs(size, last):
            return [
                latent.attend(query[0, :, run], keys[0], batch.mask(row, window, run), scores.scaling) for run in runs
            ]
        keys, values = latent.expanded(keys)
    attend = _attend if plain else _attend_by_hand
    return [
        attend(query[:, :, run], keys[None], values[None], batch.mask(row, window, run), scores)[0].transpose(0, 1)
        for run in runs
    ]


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scores: _Scores
) -> torch.Tensor:
    """[1, head, q, value_dim]; without softcap and sinks, which the fused kernel lacks."""
    assert scores.softcap is None
    assert scores.sinks is None
    grouped = query.shape[1] != keys.shape[1]
    return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scores.scaling, enable_gqa=grouped)


def _attend_by_hand(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, how: _Scores
) -> torch.Tensor:
    """Does what `_attend` does, with what the fused kernel lacks: capped scores, and sinks that take part in the
    softmax only."""
    scaling, softcap, sinks = how
    groups = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    scores = query @ keys.transpose(2, 3) * (1 / math.sqrt(query.shape[-1]) if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(-1, -1, scores.shape[2], 1)], -1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return weights[..., : keys.shape[2]] @ values
