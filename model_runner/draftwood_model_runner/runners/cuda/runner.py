"""The runner for GPUs: tree attention in Triton over paged keys and values, whole steps replayed as CUDA graphs.

Triton compiles a kernel for each value of its constants when it is first launched, which takes up to seconds. The
kernels of the model are compiled when steps are captured. Those that choose tokens and accept paths depend on the
requests, so the runner takes some first steps with them, and no request waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch

from draftwood_model_runner.request import SamplingParams
from draftwood_model_runner.runners.base import (
    NO_LIMITS,
    DraftLimits,
    Following,
    KVCompaction,
    KVShape,
    Predictions,
    Runner,
    StepBatch,
)
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.runners.cuda.device import to_device
from draftwood_model_runner.runners.cuda.following import Followed
from draftwood_model_runner.runners.cuda.forward import CAPTURES, Forward, Graphs
from draftwood_model_runner.runners.cuda.memory import NO_FEATURES, PAGE_SIZE, FeatureShape, KVPages
from draftwood_model_runner.runners.cuda.recurrent_layers import STATE_NODES, LayerShape, LayerStates, allocated
from draftwood_model_runner.runners.cuda.sampling import Clock, CudaStep, LaunchedStep, sampling_of
from draftwood_model_runner.runners.cuda.state_rows import SPARE_SEQUENCES, StateRows
from draftwood_model_runner.runners.cuda.tiling import LEVELS
from draftwood_model_runner.runners.machine import bytes_per_token, device_errors, state_capacity
from draftwood_model_runner.sampling.metadata import (
    MOST_PROBABLE,
    NO_MASK,
    Adjustments,
    SamplingMetadata,
    SequenceSampling,
    TokenMasks,
)
from draftwood_model_runner.sampling.token_sampler import TokenSampler
from draftwood_strategies.draft import DraftTree

_SEQUENCES = 16
"""Sequences with recurrent layers that are live at once, where nobody says how many."""
_MOST_KEPT = 256
"""States that are kept for sequences with the same prefix, at most."""
_TREES = (1, 31, 63, 127, 255)
"""Nodes, of which each has another block size of `accept_paths`."""


@dataclass(frozen=True, slots=True)
class CudaLayout:
    """What the keys and values of one token are.

    Attributes:
        shapes: for each layer.
        group: heads that share a key, at most.
        exact: outputs are bit-identical with and without drafts, in any batch.
        layers: numbers of those that attend; None if all do.
        recurrent layers: what each layer with a state keeps.
        features: what it shows to draft heads, or what a head is given.
    """

    shapes: tuple[KVShape, ...]
    group: int
    dtype: torch.dtype
    device: torch.device
    exact: bool = False
    layers: tuple[int, ...] | None = None
    recurrent_layers: tuple[LayerShape, ...] = ()
    features: FeatureShape = NO_FEATURES

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of a sequence after a token."""
        return sum(shape.state_bytes for shape in self.recurrent_layers)

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes of states and inputs of nodes: a step has those before it and those after it."""
        return 2 * (self.state_bytes + sum(shape.node_bytes for shape in self.recurrent_layers))


class CudaRunner:
    """Implements `runners.base.Runner`.

    Args:
        module: a transformers model whose attention is `attention.paged_attention`, see `probe`.
        kv_tokens: capacity of its KV memory.
        graphs: replay steps of up to `forward.SIZES[-1]` tokens as CUDA graphs.
        sequences: with recurrent layers, that are live at once at most; None: `_SEQUENCES`, or as many as memory holds.

    Attributes:
        states: which sequences have states of recurrent layers; None without such layers.
    """

    page_size: ClassVar[int] = PAGE_SIZE
    is_asynchronous: ClassVar[bool] = True
    mixed_batches: ClassVar[bool] = True

    def __init__(
        self, module: Any, layout: CudaLayout, kv_tokens: int, graphs: bool = True, sequences: int | None = None
    ) -> None:
        self.states: StateRows | None = None
        memory: tuple[LayerStates, ...] = ()
        if layout.recurrent_layers:
            self.states, memory = _state_memory(layout, kv_tokens, sequences)
        self._kv = KVPages(layout.shapes, layout.dtype, layout.device, kv_tokens, layout.layers)
        self.pages = self._kv.pages
        self._forward = Forward(module, self._kv, layout.group, layout.device, layout.exact, memory, layout.features)
        capture = CAPTURES.get(layout.device.type) if graphs else None
        self._graphs = None if capture is None else Graphs(self._forward, capture(self._forward))
        self._device, self._exact = layout.device, layout.exact
        self._limits = DraftLimits(max_depth=LEVELS) if layout.exact else NO_LIMITS
        if self.states is not None:
            self._limits = DraftLimits(max_nodes=STATE_NODES)
        if self._graphs is not None and layout.device.type == "cuda":
            with torch.inference_mode():
                self._graphs.capture_all()
            if not layout.features.given:  # a head's tokens are chosen by the host
                compile_sampling(self)

    @property
    def capture_problem(self) -> str:
        """Why steps are not replayed as CUDA graphs; empty if they are."""
        return "" if self._graphs is None else self._graphs.reason

    def draft_limits(self, position: int) -> DraftLimits:
        return self._limits

    @property
    def follows(self) -> bool:
        """See `FollowedRunner`. Recurrent layers are told by the host which nodes were accepted, and exact mode lays
        attention out along the drafts."""
        return self.states is None and not self._exact

    def step(self, batch: StepBatch, top_k: int) -> Predictions:
        predictions = self.launch(batch, top_k).wait()[0].predictions
        if predictions.features is None:
            return predictions
        with device_errors("copying features"):
            return predictions._replace(features=predictions.features.float().cpu().numpy())

    def begin(self, batch: StepBatch, top_k: int, samplers: SequenceOf[TokenSampler | None]) -> CudaStep:
        sampling = sampling_of(batch, samplers)
        return CudaStep(self, batch, samplers, sampling, self.launch(batch, top_k, sampling))

    def follow(
        self, earlier: CudaStep, following: Following, batch: StepBatch, samplers: SequenceOf[TokenSampler | None]
    ) -> CudaStep:
        sampling = sampling_of(batch, samplers)
        with device_errors("the end of a step"), torch.inference_mode():
            followed = Followed(earlier.written, following)
        launched = self.launch(batch, 0, sampling, followed)
        return CudaStep(self, batch, samplers, sampling, launched)

    @torch.inference_mode()
    def launch(
        self, batch: StepBatch, top_k: int, sampling: SamplingMetadata | None = None, followed: Followed | None = None
    ) -> LaunchedStep:
        """One forward pass. With sampling, it chooses tokens, and moves keys and values of accepted nodes behind the
        committed ones.

        Args:
            followed: the step in flight that it goes on with, if any.

        Raises:
            DeviceMemoryError, DeviceLostError: as `step`.
        """
        what = f"a step of {batch.size} tokens"
        planned = [] if self.states is None else self.states.plan(batch)
        try:
            with device_errors(what):
                clock = Clock(self._device)
                trees = None if followed is None else followed.trees()
                ready = self._forward.prepare(batch, sampling, planned)
                laid_out = None if followed is None else followed.fill(ready.buffers.arrays, batch, trees)
                if self._graphs is None or not self._graphs.run(ready):
                    self._forward.logits = self._forward.launch(ready)
                results = self._forward.sample(ready, top_k, sampling)
                clock.stop()
        except BaseException:
            if self.states is not None:
                self.states.discard(planned)
            raise
        return LaunchedStep(results, clock, what, [] if self.states is None else self.states.commit(planned), laid_out)

    @torch.inference_mode()
    def compact_kv(self, moves: KVCompaction) -> None:
        slots: npt.NDArray[Any] = np.stack([moves.sources, moves.targets], 1).astype(np.int64)
        with device_errors("moving keys and values"):
            arrays = to_device(
                {"slots": slots, "offsets": moves.offsets, "counts": np.diff(moves.offsets)}, self._device
            )
            self._kv.move(arrays["slots"], arrays["offsets"], arrays["counts"])


def _state_memory(
    layout: CudaLayout, kv_tokens: int, sequences: int | None
) -> tuple[StateRows, tuple[LayerStates, ...]]:
    kv_bytes = kv_tokens * bytes_per_token(layout.shapes, layout.dtype.itemsize)
    each, state = layout.bytes_per_sequence, layout.state_bytes
    affordable, kept_bytes = state_capacity(each, kv_bytes, layout.device)
    live = max(1, min(sequences or _SEQUENCES, affordable - SPARE_SEQUENCES))
    rows = StateRows(PAGE_SIZE, live, max(1, min(_MOST_KEPT, kept_bytes // state)), state, each)
    return rows, allocated(layout.recurrent_layers, rows.live_rows, rows.rows, layout.device)


class Launcher(Runner, Protocol):
    """`runner.CudaRunner`."""

    def launch(self, batch: StepBatch, top_k: int, sampling: SamplingMetadata | None = None) -> LaunchedStep: ...


def compile_sampling(runner: Launcher) -> None:
    """Greedy steps with draft trees of all sizes that fit its memory, then sampled ones with masks and
    log-probabilities. Overwrites the first KV pages.

    Raises:
        DeviceMemoryError, DeviceLostError: as `step` of the runner.
    """
    predictions = _step(runner, 0, MOST_PROBABLE)
    for nodes in _TREES:
        if nodes < runner.pages * runner.page_size:
            _step(runner, nodes, MOST_PROBABLE)
    vocab = int(predictions.logits.shape[1])
    for masks in (None, TokenMasks(np.full(2, NO_MASK, np.int32), np.zeros((1, -(-vocab // 32)), np.int32))):
        _step(runner, 1, _sampled(masks), logprobs=1)


def _step(runner: Launcher, nodes: int, sampling: SequenceSampling | int, logprobs: int | None = None) -> Predictions:
    tree = DraftTree.of([i % 2 for i in range(nodes)], [(i + 1) // 2 - 1 for i in range(nodes)])
    row = BatchRow(np.arange(runner.pages, dtype=np.int32), 0, np.zeros(1, np.int32), tree, logits_from=0)
    return runner.launch(lay_out([row]), 0, SamplingMetadata.of([sampling], [logprobs])).wait()[0].predictions


def _sampled(masks: TokenMasks | None) -> SequenceSampling:
    """Sampling of every kind, with one adjusted token."""
    zero = np.zeros(1, np.int32)
    adjustments = Adjustments(zero, zero, zero.astype(np.float32), zero)
    return SequenceSampling(SamplingParams(1.0, 2, 0.9, 0.1, 1.1, 0.1, 0.1), 0, adjustments, masks)
