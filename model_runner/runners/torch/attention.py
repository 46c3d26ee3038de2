"""The one attention function: every node of every sequence's tree attends to its context and its own ancestors.

transformers calls `tree_attention` in place of a model's own attention. The step's `StepBatch` reaches it as the
extra keyword argument `batch` of the model's forward, so that no modelling file is touched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from model_runner.runners.torch.exact_attention import attend_exactly, pieces
from model_runner.runners.torch.kv_cache import KVLayout, Slab
from model_runner.runners.torch.machine import kernel_width
from strategies.draft import DraftTree, Float32Array, Int32Array

ATTENTION_NAME = "draftwood"


@dataclass(eq=False, slots=True)
class Segment:
    """One sequence's share of a step: a run of tokens that form a tree under its committed context.

    Prefill is a chain; decoding is a chain of one, the last token, with the draft tree under it.

    Attributes:
        slab: its keys and values; the step writes rows `context` to `context + size`.
        context: how many tokens are committed.
        tokens: int32[size].
        parents: int32[size], in this numbering; -1 hangs from the end of the context.
        depths: int32[size]; a token's absolute position is `context + depth`.
        logit_rows: the tokens from here to the end of the segment need logits.
    """

    slab: Slab
    context: int
    tokens: Int32Array
    parents: Int32Array
    depths: Int32Array
    logit_rows: int
    _masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)
    _pieces: list[tuple[slice, int]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def pieces(self) -> list[tuple[slice, int]]:
        """Runs of rows for `attend_exactly`, each with the position of its first."""
        if not self._pieces:
            positions = self.depths + self.context
            self._pieces = [(rows, int(positions[rows.start])) for rows in pieces(positions)]
        return self._pieces

    def mask(self, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """[size, context + size], 0 where a token attends and -inf where it must not; None where all attend to all.

        `window`: a token attends to the last `window` positions, its own included; None to all.
        """
        if window is not None and window > self.context + self.size:
            window = None  # wider than any position
        if window not in self._masks:
            self._masks[window] = self._build_mask(window, dtype, device)
        return self._masks[window]

    def _build_mask(self, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        if self.size == 1 and window is None:
            return None
        mask = np.empty((self.size, self.context + self.size), np.float32)
        _fill_mask(self.parents, self.depths, self.context, 2**31 - 1 if window is None else window, mask)
        return torch.from_numpy(mask).to(device=device, dtype=dtype)


@dataclass(eq=False, slots=True)
class StepBatch:
    """The flat batch of one forward pass: the segments' tokens, one after the other."""

    segments: list[Segment]
    layout: KVLayout

    def inputs(self) -> dict[str, Any]:
        """Keyword arguments for the model: input_ids int64[1, T], position_ids int64[1, T], logits_to_keep int64[R].

        On a CPU, T and R are a little more than what the segments have, so that kernels are made for few widths: what
        is added at the end means nothing.
        """
        tokens, positions, rows = [], [], []
        start, device = 0, self.layout.device
        for segment in self.segments:
            tokens.append(segment.tokens)
            positions.append(segment.depths + segment.context)
            rows.append(np.arange(start + segment.logit_rows, start + segment.size, dtype=np.int32))
            start += segment.size
        if device.type == "cpu":
            tokens.append(_filling(start))
            positions.append(tokens[-1])
            rows.append(_filling(sum(part.size for part in rows)))
        return {
            "input_ids": _to_device(tokens, device)[None],
            "position_ids": _to_device(positions, device)[None],
            "logits_to_keep": _to_device(rows, device),
            "use_cache": False,
            "batch": self,
        }


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
    *,
    batch: StepBatch,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over a flat batch of trees; writes the step's keys and values into the slabs.

    Args:
        query: [1, head, T, key_dim]; key: [1, kv_head, T, key_dim]; value: [1, kv_head, T, value_dim].
        attention_mask: None; the mask comes from `batch`.
        sliding_window, softcap, s_aux: window in tokens, cap of the scores (Gemma 2), attention sinks
            [head] (gpt-oss), where the model has them.

    Returns:
        [1, T, head, value_dim] and no weights.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    outputs = []
    start = 0
    for segment in batch.segments:
        end, first, last = start + segment.size, segment.context, segment.context + segment.size
        keys, values = segment.slab.keys[layer], segment.slab.values[layer]
        keys[:, first:last] = key[0, :, start:end]
        values[:, first:last, : value.shape[3]] = value[0, :, start:end]
        mask = segment.mask(sliding_window, keys.dtype, keys.device)
        if batch.layout.exact:
            for rows, position in segment.pieces:
                queries = query[0, :, start + rows.start : start + rows.stop]
                seen = None if mask is None else mask[rows, : first + rows.stop]
                outputs.append(
                    attend_exactly(queries, keys, values, first + rows.start, position, seen, scaling, softcap, s_aux)
                )
        else:
            attend = _attend_by_hand if softcap is not None or s_aux is not None else _attend
            context = keys[None, :, :last], values[None, :, :last]
            output = attend(query[:, :, start:end], *context, mask, scaling, softcap, s_aux)
            outputs.append(output[0].transpose(0, 1))
        start = end
    if start < query.shape[2]:
        outputs.append(query.new_zeros(query.shape[2] - start, *outputs[0].shape[1:]))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output[None].contiguous(), None


def _filling(width: int) -> Int32Array:
    """Zeros int32[n] that bring `width` to the next width that kernels are made for."""
    return np.zeros(kernel_width(width) - width, np.int32)


def _to_device(parts: list[Int32Array], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)


def register() -> None:
    """Makes `tree_attention` known to transformers under `ATTENTION_NAME`."""
    AttentionInterface.register(ATTENTION_NAME, tree_attention)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[1, head, q, value_dim]; without softcap and sinks, which the fused kernel lacks."""
    assert softcap is None
    assert sinks is None
    grouped = query.shape[1] != keys.shape[1]
    return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling, enable_gqa=grouped)


def _attend_by_hand(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """As `_attend`, for what the fused kernel lacks: capped scores, and sinks that take part in the softmax only."""
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


def chain_then_tree(
    chain: Int32Array, tree: DraftTree, least: float = 0.0
) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Tokens, parents and depths, each int32[c + n], of a chain int32[c] with a tree under its end.

    `least`: of the tree only the n nodes with at least this score; with a node goes all that hangs from it.
    """
    tokens, parents, depths = np.empty((3, chain.shape[0] + len(tree)), np.int32)
    size = int(_lay_out(chain, tree.tokens, tree.parents, tree.scores, least, tokens, parents, depths))
    return tokens[:size], parents[:size], depths[:size]


@numba.njit(cache=True, nogil=True)
def _lay_out(
    chain: Int32Array,
    tree_tokens: Int32Array,
    tree_parents: Int32Array,
    scores: Float32Array,
    least: float,
    tokens: Int32Array,
    parents: Int32Array,
    depths: Int32Array,
) -> int:
    """Fills the last three; returns how much of them."""
    c = chain.shape[0]
    for i in range(c):
        tokens[i], parents[i], depths[i] = chain[i], i - 1, i
    size: int = c
    places = np.empty(scores.shape[0], np.int32)
    for node in range(scores.shape[0]):
        if scores[node] >= least:
            parent = c - 1 if tree_parents[node] < 0 else places[tree_parents[node]]
            tokens[size], parents[size], depths[size] = tree_tokens[node], parent, depths[parent] + 1
            places[node] = size
            size += 1
    return size
