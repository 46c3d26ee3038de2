"""The runner for GPUs: tree attention in Triton over paged keys and values, whole steps replayed as CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from model_runner.runners.base import NO_LIMITS, DraftLimits, KVMoves, KVShape, Predictions, StepBatch
from model_runner.runners.cuda.forward import Forward
from model_runner.runners.cuda.graphs import GRAPH_TOKENS, Graphs
from model_runner.runners.cuda.kv_cache import PAGE_SIZE, KVPages
from model_runner.runners.cuda.kv_moves import KVMover


@dataclass(frozen=True, slots=True)
class CudaLayout:
    """What the keys and values of one token are.

    Attributes:
        shapes: for each layer.
        group: heads that share a key, at most.
    """

    shapes: tuple[KVShape, ...]
    group: int
    dtype: torch.dtype
    device: torch.device


class CudaRunner:
    """Implements `runners.base.Runner`.

    Args:
        module: a transformers model whose attention is `attention.paged_attention`, see `probe`.
        kv_tokens: capacity of its KV memory.
        graphs: replay steps of up to `GRAPH_TOKENS` tokens as CUDA graphs; on a CPU, record them and check that a
            replay would do the same.
    """

    page_size = PAGE_SIZE

    def __init__(self, module: Any, layout: CudaLayout, kv_tokens: int, graphs: bool = True) -> None:
        self._kv = KVPages(layout.shapes, layout.dtype, layout.device, kv_tokens)
        self.pages = self._kv.pages
        self._forward = Forward(module, self._kv, layout.group, layout.device, GRAPH_TOKENS)
        self._graphs = Graphs(self._forward) if graphs else None
        self._mover = KVMover(self._kv, layout.device)

    def draft_limits(self, position: int) -> DraftLimits:
        return NO_LIMITS

    @torch.inference_mode()
    def step(self, batch: StepBatch, top_k: int) -> Predictions:
        ready = self._forward.prepare(batch)
        if self._graphs is None or not self._graphs.run(ready):
            self._forward.run(ready)
        return self._forward.predictions(ready, top_k)

    @torch.inference_mode()
    def keep(self, moves: KVMoves) -> None:
        self._mover.move(moves)
