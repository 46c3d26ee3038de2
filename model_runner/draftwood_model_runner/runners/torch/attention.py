"""The attention function: every node of every draft tree attends to its context and its own ancestors."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from draftwood_model_runner.runners.attention_hook import AttentionHook
from draftwood_model_runner.runners.torch.exact_attention import attend_exactly, block_of
from draftwood_model_runner.runners.torch.latents import LatentProjection, latent_projection
from draftwood_model_runner.runners.torch.torch_batch import TorchBatch, first_entry


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
    """As `_attend_row_exactly`.

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
    """As `_attend`, for what the fused kernel lacks: capped scores, and sinks that take part in the softmax only."""
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
