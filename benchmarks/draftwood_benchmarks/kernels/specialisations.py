"""The kernels of the cuda runner as they ship: every launch of its own code, for the models that it serves."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from draftwood_model_runner.request import SamplingParams
from draftwood_model_runner.runners.base import KVShape
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.runners.cuda.device.launching import Machine
from draftwood_model_runner.runners.cuda.exact_linear import exact_linear
from draftwood_model_runner.runners.cuda.fusing.attention import fused_rotation
from draftwood_model_runner.runners.cuda.fusing.mlp import fused_silu
from draftwood_model_runner.runners.cuda.fusing.norms import FusedNorm
from draftwood_model_runner.runners.cuda.kv_cache import PAGE_SIZE, KVPages
from draftwood_model_runner.runners.cuda.steps.attention import STEP, AttentionStep, paged_attention
from draftwood_model_runner.runners.cuda.steps.choosing import choose_and_keep
from draftwood_model_runner.runners.cuda.steps.exact_tiling import LEVELS, divide_exactly
from draftwood_model_runner.runners.cuda.steps.forward import Workspace, find_top
from draftwood_model_runner.runners.cuda.steps.tiling import Division, divide
from draftwood_model_runner.sampling.metadata import (
    NO_MASK,
    Adjustments,
    SamplingMetadata,
    SequenceSampling,
    TokenMasks,
)
from draftwood_strategies.draft import DraftTree

CPU = torch.device("cpu")
HEAD_SIZES = (64, 80, 96, 128, 192, 256)
_KV_HEADS, _GROUP, _VOCAB, _HIDDEN = 8, 4, 32_000, 4096


class Variant(NamedTuple):
    """What a model's attention is compiled for.

    Attributes:
        rows: of a part of attention.
        window, softcap: whether its layers have them; sinks likewise.
        exact: in exact mode.
    """

    head_size: int
    dtype: torch.dtype = torch.bfloat16
    rows: int = 64
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    exact: bool = False

    def __str__(self) -> str:
        extras = [name for name in ("window", "softcap", "sinks", "exact") if getattr(self, name)]
        dtype = str(self.dtype).removeprefix("torch.")
        return " ".join([f"{self.head_size}", dtype, f"{self.rows} rows", *extras])

    def run(self, capability: int) -> None:
        """Launches what a step with a draft and a sampled sequence launches on a GPU of this compute capability."""
        _step(self, capability)


def _variants() -> list[Variant]:
    """All in bfloat16; for the most usual size also the other dtypes, and what some families add."""
    found = [Variant(size, rows=rows) for size in HEAD_SIZES for rows in (16, 64)]
    found += [Variant(size, rows=16, exact=True) for size in HEAD_SIZES]
    found += [Variant(128, torch.float16), Variant(128, torch.float32, rows=16), Variant(128, window=True)]
    found += [Variant(64, window=True, sinks=True)]
    return [*found, Variant(256, window=True, softcap=True), Variant(256, torch.float32, rows=16)]


VARIANTS = _variants()


def _step(variant: Variant, capability: int) -> None:
    shape = KVShape(_KV_HEADS, variant.head_size, variant.head_size)
    tree = DraftTree.of([*range(20)], [-1, *range(19)])
    zeros = np.zeros(1, np.int32)
    batch = lay_out([BatchRow(np.arange(4, dtype=np.int32), 20, zeros, tree, 0)])
    division, levels = Division(variant.rows // _GROUP, 2), LEVELS if variant.exact else 0
    tiles = divide_exactly(batch, division.tile) if variant.exact else divide(batch, division)
    kv = KVPages((shape,), variant.dtype, CPU, 4 * PAGE_SIZE)
    space = Workspace(
        (shape,), batch.size, tiles.ancestor_bitmask.shape[1], tiles.parts.shape[0], variant.rows, 4, CPU, levels
    )
    masks = TokenMasks(np.full(batch.size, NO_MASK, np.int32), np.zeros((1, _VOCAB // 32), np.int32))
    adjustments = Adjustments(zeros, zeros, zeros.astype(np.float32), zeros)
    params = SamplingParams(1.0, 5, 0.9, 0.1, 1.1, 0.1, 0.1, seed=1)
    sampling = SamplingMetadata.of([SequenceSampling(params, 9, adjustments, masks)])
    space.arrays.fill(batch, tiles, batch.size, sampling)
    layer: Any = torch.nn.Module()
    layer.layer_idx = 0
    query = torch.zeros(1, _KV_HEADS * _GROUP, batch.size, variant.head_size, dtype=variant.dtype)
    key = query[:, :_KV_HEADS]
    with STEP.during(AttentionStep(kv, space.arrays, space.scratch, Machine(2, capability), variant.rows)):
        paged_attention(
            layer,
            query,
            key,
            key,
            None,
            sliding_window=4096 if variant.window else None,
            softcap=50.0 if variant.softcap else None,
            s_aux=query[0, :, 0, 0] if variant.sinks else None,
        )
    hidden = torch.zeros(1, batch.size, _HIDDEN, dtype=variant.dtype)
    exact_linear(torch.empty(_HIDDEN, _HIDDEN, dtype=variant.dtype), hidden[0, 0])(hidden)
    _fused_operations(hidden, query)
    logits = torch.zeros(batch.size, _VOCAB, dtype=variant.dtype)
    find_top(logits, space)
    choose_and_keep(logits, space.top[:, -1], space.arrays, sampling, kv)


def _fused_operations(hidden: torch.Tensor, query: torch.Tensor) -> None:
    """Of rows [1, T, width] and queries [1, head, T, size]: their norms, those of sums, gated products, rotation."""
    for add_one in (False, True):
        norm = FusedNorm(hidden[0, 0], 1e-6, add_one)
        norm(hidden)
        norm.of_sum(hidden, hidden)
        FusedNorm(query[0, 0, 0], 1e-6, add_one)(query.transpose(1, 2))
    fused_silu(*hidden.chunk(2, -1))
    fused_rotation(query, query[:, :_KV_HEADS], query[0, :1], query[0, :1])
