"""One layer's attention on the device: by our kernels, by causal attention of torch, and in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from draftwood_model_runner.runners.base import KVShape
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.runners.cuda.attention import STEP, AttentionStep, paged_attention
from draftwood_model_runner.runners.cuda.device import machine
from draftwood_model_runner.runners.cuda.forward import StepBuffers, division
from draftwood_model_runner.runners.cuda.memory import PAGE_SIZE, KVPages
from draftwood_model_runner.runners.cuda.tiling import divide
from draftwood_strategies.draft import EMPTY_TREE, DraftTree

_KV_HEADS, _GROUP, _SIZE = 8, 4, 128
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


class AttentionCase:
    """A tree of `nodes` under one token, after a context.

    Attributes:
        bytes: that must be read: keys and values of all entries, once.
        tolerance: the largest error that is rounding, of numbers of about 1.
    """

    def __init__(self, context: int, nodes: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = KVShape(_KV_HEADS, _SIZE, _SIZE)
        random = np.random.default_rng(nodes)
        pages = -(-(context + 1 + nodes) // PAGE_SIZE)
        order = random.permutation(pages).astype(np.int32)
        tree = random_tree(random, nodes, deep=0.6)
        self._batch = lay_out([BatchRow(order, context, np.zeros(1, np.int32), tree, 0)])
        self._kv = KVPages((shape,), dtype, device, pages * PAGE_SIZE)
        self._kv.layers[0].normal_()
        self._order = torch.from_numpy(order.astype(np.int64)).to(device)
        tokens = self._batch.size
        self._query, self._key, self._value = (
            torch.randn(1, heads, tokens, _SIZE, dtype=dtype, device=device)
            for heads in (_KV_HEADS * _GROUP, _KV_HEADS, _KV_HEADS)
        )
        rows = 64 if tokens * _GROUP > 16 and dtype != torch.float32 else 16
        of_device = machine(device, _SIZE)
        tiles = divide(self._batch, division(rows, _GROUP, _KV_HEADS, of_device))
        space = StepBuffers(
            (shape,), tokens, tiles.ancestor_bitmask.shape[1], tiles.parts.shape[0], rows, pages, device
        )
        space.arrays.fill(self._batch, tiles, tokens)
        self._step = AttentionStep(self._kv, space.arrays, space.scratch, of_device, rows)
        layer: Any = torch.nn.Module()
        layer.layer_idx = 0
        self._layer = layer
        self._context = context
        self._causal = causal_lower_right(tokens, context + tokens) if tokens > 1 else None
        self.bytes = 2 * (context + tokens) * _KV_HEADS * _SIZE * dtype.itemsize
        self.tolerance = _TOLERANCE[dtype]
        self.run()  # writes keys and values of the step's own tokens
        self._side_by_side = self._entries()

    def run(self) -> torch.Tensor:
        """[1, T, head, size]."""
        with STEP.during(self._step):
            return paged_attention(self._layer, self._query, self._key, self._value, None)[0]

    def run_causal(self) -> torch.Tensor:
        """Causal attention of the same size by torch: the step's tokens as a chain after the context, whose keys and
        values lie side by side. `is_causal` would let them see the first entries only."""
        return scaled_dot_product_attention(self._query, *self._side_by_side, attn_mask=self._causal, enable_gqa=True)

    def error(self) -> float:
        """The largest difference to attention in float64."""
        output = self.run()[0].double()
        keys, values = (part.double() for part in self._side_by_side)
        seen = torch.zeros(self._batch.size, keys.shape[2], dtype=torch.bool)
        seen[:, : self._context] = True
        for i, parent in enumerate(self._batch.parents.tolist()):
            if parent >= 0:
                seen[i] = seen[parent]
            seen[i, self._context + i] = True
        group = self._query.shape[1] // _KV_HEADS
        query = self._query.double().view(_KV_HEADS, group, -1, _SIZE)
        scores = torch.einsum("hgqd,hkd->hgqk", query, keys[0]) / math.sqrt(_SIZE)
        scores.masked_fill_(~seen.to(scores.device), -math.inf)
        right = torch.einsum("hgqk,hkd->qhgd", torch.softmax(scores, -1), values[0])
        return float((output - right.reshape(output.shape)).abs().max())

    def _entries(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [1, kv_head, entry, size] of the context and the step, in their order."""
        entries = self._kv.layers[0][self._order].transpose(0, 1).reshape(_KV_HEADS, -1, 2 * _SIZE)
        entries = entries[None, :, : self._context + self._batch.size]
        return entries[..., :_SIZE].contiguous(), entries[..., _SIZE:].contiguous()


def random_tree(random: np.random.Generator, nodes: int, deep: float) -> DraftTree:
    """`deep`: how likely a node hangs from the one before it."""
    if not nodes:
        return EMPTY_TREE
    parents = [i - 1 if random.random() < deep else int(random.integers(-1, i)) for i in range(nodes)]
    return DraftTree.of([*range(nodes)], parents)
