"""The reference runner: any transformers model by torch, on CPUs and CUDA; the home of exact mode on CPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from draftwood_model_runner.runners.base import NO_LIMITS, DraftLimits, HostStep, KVCompaction, Predictions, StepBatch
from draftwood_model_runner.runners.machine import default_capacity, default_threads, device_errors
from draftwood_model_runner.runners.model_calls import (
    HANDED_ON,
    HeadModel,
    logits_of_rows,
    noted_features,
    positions_of_step,
    takes_positions,
)
from draftwood_model_runner.runners.torch.attention import BATCH, TorchBatch
from draftwood_model_runner.runners.torch.exact_attention import SUM_BLOCK, draft_limits
from draftwood_model_runner.runners.torch.kv_cache import PAGE_SIZE, KVCache, KVLayout
from draftwood_model_runner.runners.torch.model_cache import forward_by_row
from draftwood_model_runner.runners.torch.packed_linear import pack_linears
from draftwood_model_runner.runners.torch.states import states_of_step
from draftwood_model_runner.sampling.most_probable import most_probable
from draftwood_model_runner.sampling.token_sampler import TokenSampler
from draftwood_strategies.arrays import Float32Array


class TorchRunner:
    """Implements `runners.base.Runner`.

    Args:
        module: a transformers model whose attention is `attention.tree_attention`, see `probe`.
        layout: the shape of its keys and values.
        kv_tokens: capacity of its KV memory.
        threads: CPU threads of a step; None takes `default_threads`.
        feature_layers: whose inputs steps show, see `noted_features`.
    """

    is_asynchronous: ClassVar[bool] = False
    mixed_batches: ClassVar[bool] = False

    def __init__(
        self,
        module: Any,
        layout: KVLayout,
        kv_tokens: int,
        threads: int | None = None,
        feature_layers: tuple[int, ...] = (),
    ) -> None:
        self._module, self._feature_layers = module, feature_layers
        self._layout = layout
        self._kv = KVCache(layout, kv_tokens)
        self.pages, self.page_size, self.states = self._kv.pages, PAGE_SIZE, self._kv.states
        self._threads = threads or default_threads()

    def draft_limits(self, position: int) -> DraftLimits:
        if not self._layout.branches:
            return DraftLimits(branches=False)
        return draft_limits(position) if self._layout.exact else NO_LIMITS

    @torch.inference_mode()
    def step(self, batch: StepBatch, top_k: int) -> Predictions:
        torch.set_num_threads(self._threads)
        layers = self._feature_layers if batch.reads_features else ()
        with device_errors(f"a step of {batch.size} tokens"), noted_features(self._module, layers) as noted:
            logits = forward(self._module, batch, self._kv)[: batch.logit_rows.size]
            shown, rows = noted.joined(), batch.size if batch.features is None else batch.logit_rows.size
            features = None if shown is None else shown[:rows].float().cpu().numpy()
            return Predictions(logits, *most_probable(logits, top_k, self._threads), features)  # waits for the device

    def begin(self, batch: StepBatch, top_k: int, samplers: SequenceOf[TokenSampler | None]) -> HostStep:
        return HostStep(self, batch, top_k, samplers, self._threads)

    @torch.inference_mode()
    def compact_kv(self, moves: KVCompaction) -> None:
        with device_errors("moving keys and values"):
            self._kv.move(moves)


@dataclass(frozen=True, eq=False, slots=True)
class TorchRunnerFactory:
    """Implements `runners.base.RunnerFactory`.

    Attributes:
        module: a transformers model whose attention is `attention.tree_attention`, see `probe`; or a `HeadModel`.
        layout: the shape of its keys and values.
        feature_layers: whose inputs steps show, see `noted_features`.
    """

    name: ClassVar[str] = "torch"
    module: Any
    layout: KVLayout
    feature_layers: tuple[int, ...] = ()

    @property
    def exact(self) -> bool:
        return self.layout.exact

    @property
    def window(self) -> int | None:
        if self.layout.window is None or not self.layout.exact:
            return self.layout.window
        return self.layout.window + SUM_BLOCK - 1  # all queries of a block begin with the same key

    @property
    def kv_bytes_per_token(self) -> int:
        return self.layout.bytes_per_token

    def default_kv_tokens(self, context: int, sequences: int) -> int:
        layout = self.layout
        per_token, per_sequence = max(1, layout.bytes_per_token), layout.bytes_per_sequence
        return default_capacity(per_token, layout.device, context, sequences, per_sequence)

    def runner(self, kv_tokens: int, threads: int | None = None, sequences: int | None = None) -> TorchRunner:
        return TorchRunner(self.module, self.layout, kv_tokens, threads, self.feature_layers)


def take_over_head(
    head: Any, target: TorchRunnerFactory
) -> tuple[TorchRunnerFactory, Callable[[Sequence[Any]], Float32Array]]:
    """A draft head as this runner computes it, and `HeadParts.combine`. It has no exact mode: drafts decide no token.

    Args:
        head: is changed as a model is, and takes the dtype and the device of its target.

    Raises:
        UnsupportedModelError: see `HeadModel`.
    """
    module = HeadModel(head, target.module)
    pack_linears(module)
    BATCH.install(head)
    layout = KVLayout(head.kv_shapes, module.dtype, module.device)
    return TorchRunnerFactory(module, layout, HANDED_ON), module.combine


def forward(module: Any, batch: StepBatch, kv: KVCache) -> torch.Tensor:
    """Logits [R, vocab], R rounded up on a CPU; writes the keys, values and states of the batch."""
    if kv.layout.model_cache is not None:
        return forward_by_row(module, batch, kv, kv.layout.model_cache)
    of_step = TorchBatch(batch, kv)
    inputs = of_step.inputs()
    positions = inputs["position_ids"]
    if not takes_positions(module.__class__):  # as in Mamba
        del inputs["position_ids"]
    states = states_of_step(batch, kv.states, inputs["input_ids"].shape[1], kv.layout.device)
    with BATCH.during(of_step), positions_of_step(positions), states:
        return logits_of_rows(module, **inputs)
