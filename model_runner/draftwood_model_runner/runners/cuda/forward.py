"""One forward pass on the device: what goes in, what is launched, what comes out, and its replay as a CUDA graph.

A graph is one launch in place of the hundreds that a forward pass makes. One is captured for each padded size and each
number of rows of attention's parts. Which sequences share a step, and how long their contexts are, is in the arrays
that it reads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from draftwood_model_runner.runners.base import KVShape, StepBatch
from draftwood_model_runner.runners.cuda.attention import STEP, AttentionStep, Scratch
from draftwood_model_runner.runners.cuda.device import (
    LEAST_RUN,
    LEAST_RUN_OF_MANY,
    PROGRAMS,
    TOP_BLOCK,
    DeviceBuffer,
    Machine,
    launch,
    machine,
    power_of_2,
)
from draftwood_model_runner.runners.cuda.kernels.sampling import top_of_blocks, top_of_rows
from draftwood_model_runner.runners.cuda.memory import NO_FEATURES, FeatureShape, KVPages, StepArrays
from draftwood_model_runner.runners.cuda.recurrent_layers import DeviceStep, LayerStates
from draftwood_model_runner.runners.cuda.sampling import TOP, Results, log_probabilities, sample_and_accept
from draftwood_model_runner.runners.cuda.state_rows import WALK, PlannedRow, StateArrays, StateLayout
from draftwood_model_runner.runners.cuda.tiling import LEVELS, NO_TILES, Division, Tiles, divide, divide_exactly
from draftwood_model_runner.runners.model_calls import logits_of_rows, noted_features, setting
from draftwood_model_runner.runners.recurrent_layers import STEP as RECURRENT_STEP
from draftwood_model_runner.sampling.metadata import SamplingMetadata
from draftwood_model_runner.sampling.most_probable import most_probable

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 576, 640, 768, 1024)
"""Tokens that steps are filled up to, where their arrays are at fixed addresses: a prompt's chunk of 512 tokens with as
many that decode beside it."""
_LOGIT_ROWS = 512
"""Rows of logits of such steps, at most; most tokens beyond are of prompts, which need none."""
_WORDS = 4
"""Words of the ancestor bitmask of a token in such steps: trees of 256 nodes."""
_FEW_ROWS, _MANY_ROWS = 16, 64
"""Rows of a part of attention: the least that tensor cores multiply, and enough to read a context once for a tree."""
_EXACT_PARTS = 2
"""Times as many parts of attention in exact mode, where a context is divided whether the device is idle or not."""
_PAGES = 4
"""Entries of the page tables of a step, for each page of KV memory. More are rare: prefixes are shared."""

_log = logging.getLogger(__name__)


class StepBuffers:
    """What steps of up to `tokens` tokens read and write beside the model.

    Attributes:
        top: int32[tokens, TOP + 1], the most probable tokens after each row of logits, and the chosen one.
        state_arrays: for recurrent layers; None without.
        shown: [tokens, f], the features of each step, whether they are read or not; None without.
        given: its array "features", float32[tokens, d], is what a head is given; None of a model.

    Args:
        walk: entries of `state_arrays.walk`; 0 without recurrent layers.
    """

    def __init__(
        self,
        shapes: tuple[KVShape, ...],
        tokens: int,
        words: int,
        parts: int,
        rows: int,
        pages: int,
        device: torch.device,
        levels: int = 0,
        walk: int = 0,
        features: FeatureShape = NO_FEATURES,
    ) -> None:
        self.shown: torch.Tensor | None = None
        if features.layers:
            self.shown = torch.zeros((tokens, features.shown), dtype=features.dtype, device=device)
        self.given: DeviceBuffer | None = None
        if features.given:
            self.given = DeviceBuffer({"features": (np.float32, (tokens, features.given))}, device)
        self.state_arrays = StateArrays(tokens, walk, device) if walk else None
        self.arrays = StepArrays(tokens, words, parts, pages, device, levels)
        self.scratch = Scratch(shapes, parts * rows, device)
        self.top = torch.zeros((tokens, TOP + 1), dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._host_tops = [torch.zeros((tokens, TOP + 1), dtype=torch.int32, pin_memory=pinned) for _ in range(2)]

    def next_host_top(self) -> torch.Tensor:
        """int32[tokens, TOP + 1], where `top` is copied to on the host; another one for the next step."""
        self._host_tops.reverse()
        return self._host_tops[0]

    def fits(self, batch: StepBatch, tiles: Tiles, rows: int, states: StateLayout | None) -> bool:
        """Whether a step can be filled in."""
        has_states = states is None or (self.state_arrays is not None and states.fits(self.state_arrays))
        return has_states and self.arrays.fits(batch, tiles) and self.scratch.fits(tiles, rows)

    def fill(
        self,
        batch: StepBatch,
        tiles: Tiles,
        padded: int,
        sampling: SamplingMetadata | None = None,
        states: StateLayout | None = None,
    ) -> None:
        """Copies a step to the device, see `StepArrays.fill`, with the arrays for recurrent layers, and what a head is
        given."""
        self.arrays.fill(batch, tiles, padded, sampling)
        if self.given is not None and batch.features is not None:
            self.given.host["features"][: batch.size] = batch.features
            self.given.send(until="features", size=batch.features.size)
        if self.state_arrays is not None and states is not None:
            self.state_arrays.fill(states, padded)


class PreparedStep(NamedTuple):
    """A step whose inputs are on their way to the device.

    Attributes:
        tokens: T, after padding.
        logit_rows: R, after padding; `wanted` without.
        rows: of a part of attention.
        fixed: its buffers are those at fixed addresses.
        shown: rows of its features that are read.
    """

    buffers: StepBuffers
    tokens: int
    logit_rows: int
    wanted: int
    rows: int
    fixed: bool
    shown: int = 0


class Forward:
    """Steps of one model. Those of up to `SIZES[-1]` tokens use memory at fixed addresses, so that graphs can be
    replayed.

    Attributes:
        logits: [R, vocab] of the latest step.

    Args:
        group: heads that share a key, at most.
        exact: the bits of a token's logits do not depend on the other tokens of its step.
        states: of each recurrent layer.
        features: what it shows.
    """

    def __init__(
        self,
        module: Any,
        kv: KVPages,
        group: int,
        device: torch.device,
        exact: bool = False,
        states: SequenceOf[LayerStates] = (),
        features: FeatureShape = NO_FEATURES,
    ) -> None:
        self._states, self._features = states, features
        self._module, self._kv, self.device, self._exact = module, kv, device, exact
        self._group, self._shapes = group, tuple(kv.by_shape)
        self._machine = machine(device, max(shape.key_dim for shape in self._shapes))
        self._kv_heads = min(shape.kv_heads for shape in self._shapes)
        few = self.row_choices[0]
        parts = self._division(few).most_parts(SIZES[-1]) * (_EXACT_PARTS if exact else 1)
        words, levels = (1, LEVELS) if exact else (_WORDS, 0)
        self._fixed = StepBuffers(
            self._shapes, SIZES[-1], words, parts, few, _PAGES * kv.pages, device, levels, self._walk(0), features
        )
        self._large: StepBuffers | None = None
        self.logits: torch.Tensor | None = None

    @property
    def row_choices(self) -> tuple[int, ...]:
        """Rows that parts of attention have: enough for the heads of one group; few in float32, which takes twice the
        registers, and in exact mode, where their number must not depend on the step."""
        few_only = self._exact or next(iter(self._kv.layers.values())).dtype == torch.float32
        choices = (_FEW_ROWS,) if few_only else (_FEW_ROWS, _MANY_ROWS)
        return tuple(sorted({max(rows, power_of_2(self._group)) for rows in choices}))

    @property
    def fixed_memory(self) -> list[torch.Tensor]:
        """What a captured step reads and writes at the same addresses."""
        fixed = self._fixed
        memory = [*self._kv.layers.values(), fixed.arrays.buffer.memory, fixed.scratch.sums, fixed.top]
        memory += [] if fixed.shown is None else [fixed.shown]
        memory += [] if fixed.given is None else [fixed.given.memory]
        if fixed.state_arrays is not None:
            memory += [
                fixed.state_arrays.buffer.memory,
                *(tensor for states in self._states for tensor in states.tensors),
            ]
        return memory

    def prepare(
        self, batch: StepBatch, sampling: SamplingMetadata | None = None, planned: SequenceOf[PlannedRow] = ()
    ) -> PreparedStep:
        """Sends a step to the device.

        Args:
            planned: for a model with recurrent layers, of each batch row.
        """
        states = StateLayout(batch, planned) if self._states else None
        wanted = batch.logit_rows.size
        shown = 0
        if self._features.layers and batch.reads_features:
            shown = wanted if self._features.given else batch.size
        many = batch.size * self._group > _FEW_ROWS * batch.rows
        for rows in reversed(self.row_choices if many else self.row_choices[:1]):
            tiles = divide_exactly(batch, rows // self._group) if self._exact else divide(batch, self._division(rows))
            if wanted <= _LOGIT_ROWS and self._fixed.fits(batch, tiles, rows, states):
                tokens = padded_size(batch.size)
                self._fixed.fill(batch, tiles, tokens, sampling, states)
                return PreparedStep(self._fixed, tokens, min(tokens, _LOGIT_ROWS), wanted, rows, True, shown)
        if self._large is None or not self._large.fits(batch, tiles, rows, states):
            tokens, parts = padded_size(batch.size), tiles.parts.shape[0] * 5 // 4
            # At least as many words as in the others, so that the kernel is the same.
            words, levels = (
                max(tiles.ancestor_bitmask.shape[1], self._fixed.arrays.word_capacity),
                LEVELS if self._exact else 0,
            )
            self._large = StepBuffers(
                *(self._shapes, tokens, words, parts, rows, 2 * batch.block_table.size, self.device, levels),
                self._walk(0 if states is None else states.walk.size),
                self._features,
            )
        self._large.fill(batch, tiles, batch.size, sampling, states)
        return PreparedStep(self._large, batch.size, wanted, wanted, rows, False, shown)

    def prepare_padding(self, tokens: int, rows: int) -> PreparedStep:
        """A step of so many tokens that are all padding."""
        none, zero = np.zeros(0, np.int32), np.zeros(1, np.int32)
        batch = StepBatch(none, none, none, zero, none, none, zero, none)
        self._fixed.fill(batch, NO_TILES, tokens, states=StateLayout(batch, []) if self._states else None)
        return PreparedStep(self._fixed, tokens, min(tokens, _LOGIT_ROWS), 0, rows, fixed=True)

    def launch(self, ready: PreparedStep) -> torch.Tensor:
        """Launches the model and finds the most probable tokens; returns the logits [R, vocab]. Its features go to
        `StepBuffers.shown`."""
        buffers, tokens, given = ready.buffers, ready.tokens, {}
        arrays = buffers.arrays
        step = AttentionStep(self._kv, arrays, buffers.scratch, self._machine, ready.rows)
        mixing = None
        if buffers.state_arrays is not None:
            mixing = DeviceStep(self._states, buffers.state_arrays, tokens, self._machine)
        if buffers.given is not None:
            given["features"] = buffers.given["features"][None, :tokens]
        features = noted_features(self._module, self._features.layers)
        with STEP.during(step), setting(RECURRENT_STEP, mixing), features as noted:
            logits = logits_of_rows(
                self._module,
                arrays.logit_rows[: ready.logit_rows].long(),
                input_ids=arrays.tokens[None, :tokens].long(),
                position_ids=arrays.positions[None, :tokens].long(),
                use_cache=False,
                **given,
            )
        if buffers.shown is not None:
            noted.joined(buffers.shown[: ready.logit_rows if given else tokens])
        if ready.logit_rows:
            find_top(logits, buffers)
        return logits

    def sample(self, ready: PreparedStep, top_k: int, sampling: SamplingMetadata | None) -> Results:
        """Chooses the tokens after a step that was launched, and sends what it predicts to the host."""
        assert self.logits is not None
        wanted, buffers = ready.wanted, ready.buffers
        logits, logprobs, written = self.logits[:wanted], None, None
        if wanted and sampling is not None:
            top = buffers.top[:wanted]
            written = sample_and_accept(logits, top, buffers.arrays, sampling, self._kv)
            logprobs = log_probabilities(logits, top[:, TOP], buffers.arrays, sampling)
        host_top = buffers.next_host_top()[:wanted]
        host_top.copy_(buffers.top[:wanted], non_blocking=True)
        more = most_probable(logits, top_k)[1] if top_k > TOP else None  # waits
        features = None
        if buffers.shown is not None and ready.shown:
            features = buffers.shown[: ready.shown].clone()  # another step may begin before they are read
        return Results(logits, host_top, more, sampling is not None, logprobs, written, features)

    def _walk(self, entries: int) -> int:
        """Entries of `walk` in step buffers; 0 without recurrent layers."""
        return max(WALK * SIZES[-1], 2 * entries) if self._states else 0

    def _division(self, rows: int) -> Division:
        return division(rows, self._group, self._kv_heads, self._machine)


def division(rows: int, group: int, kv_heads: int, machine: Machine) -> Division:
    """How the attention of a step is divided.

    Parts with many rows leave sums as large as what they read: so there are fewer of them, and they are longer.

    Args:
        rows: of a part: its tokens, and for each of them the heads of a group.
    """
    programs, least_run = machine.programs, LEAST_RUN
    if rows > _FEW_ROWS:
        programs, least_run = min(programs, PROGRAMS * machine.processors), LEAST_RUN_OF_MANY
    return Division(rows // group, -(-programs // kv_heads), least_run)


def find_top(logits: torch.Tensor, buffers: StepBuffers) -> None:
    """Sets `buffers.top` to the most probable tokens after each row of logits [R, vocab]."""
    rows, vocab = logits.shape
    blocks = -(-vocab // TOP_BLOCK)
    best = torch.empty((rows, blocks, TOP), dtype=torch.int64, device=logits.device)
    wanted = buffers.arrays.row_count
    launch(
        top_of_blocks,
        (rows, blocks),
        *(logits, best, wanted, vocab, logits.stride(0), blocks),
        BLOCK=TOP_BLOCK,
        TOP=TOP,
    )
    launch(
        top_of_rows,
        (rows,),
        *(best, buffers.top, wanted, blocks * TOP),
        SIZE=power_of_2(blocks * TOP),
        TOP=TOP,
    )


def padded_size(tokens: int) -> int:
    """The number of tokens that a step of so many is filled up to, where its arrays are at fixed addresses."""
    for size in SIZES:
        if size >= tokens:
            return size
    return -(-tokens // SIZES[-1]) * SIZES[-1]


class Replayable(Protocol):
    """A captured step."""

    def replay(self) -> torch.Tensor:
        """Runs it on what the fixed arrays hold; returns its logits."""


class _Key(NamedTuple):
    tokens: int
    rows: int


class Graphs:
    """The captured steps of a runner.

    Attributes:
        reason: why no step is replayed; empty if they are.

    Args:
        capture: captures a step that is ready.
    """

    def __init__(self, forward: Forward, capture: Callable[[PreparedStep], Replayable]) -> None:
        self._forward, self._capture_step = forward, capture
        self._graphs: dict[_Key, Replayable] = {}
        self.reason = ""

    def capture_all(self) -> None:
        """Captures steps of all sizes, the largest first, of padding only: a capture notes what is launched, not what
        is in the arrays."""
        for size in sorted(SIZES, reverse=True):
            for rows in self._forward.row_choices:
                if not self.reason:
                    self._capture(self._forward.prepare_padding(size, rows))

    @property
    def sizes(self) -> set[int]:
        """Tokens of the captured steps."""
        return {key.tokens for key in self._graphs}

    def run(self, ready: PreparedStep) -> bool:
        """Replays a step, if it is one that a graph can be captured of."""
        if not ready.fixed or self.reason:
            return False
        key = _Key(ready.tokens, ready.rows)
        if key not in self._graphs:
            self._capture(ready)
        if self.reason:
            return False
        self._forward.logits = self._graphs[key].replay()
        return True

    def _capture(self, ready: PreparedStep) -> None:
        try:
            self._graphs[_Key(ready.tokens, ready.rows)] = self._capture_step(ready)
        except Exception as error:
            self._graphs.clear()
            self.reason = f"a step of {ready.tokens} tokens cannot be captured: {type(error).__name__}: {error}"
            _log.warning("steps run without CUDA graphs, which takes longer: %s", self.reason)


class CudaCapture:
    """Captures steps as CUDA graphs in one pool of memory.

    The pool lends its memory to one stream only, and what a step returns could not be lent again: so all are captured
    on one stream, and leave their logits in one tensor, which the first and largest one allocates.
    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._stream = torch.cuda.Stream(forward.device)
        self._pool: Any = None
        self._logits: torch.Tensor | None = None

    def __call__(self, ready: PreparedStep) -> Replayable:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            logits = self._forward.launch(ready)  # compiles kernels, and lets libraries choose theirs
            if self._logits is None:
                self._logits = torch.empty_like(logits)
            del logits
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            kept = self._logits[: ready.logit_rows]
            kept.copy_(self._forward.launch(ready))
        self._pool = self._pool or graph.pool()
        return _CudaGraph(graph, kept)


class _CudaGraph(NamedTuple):
    """Implements `Replayable`."""

    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor

    def replay(self) -> torch.Tensor:
        self.graph.replay()
        return self.logits


CAPTURES: dict[str, Callable[[Forward], Callable[[PreparedStep], Replayable]]] = {"cuda": CudaCapture}
"""What captures the steps of a type of device. Steps of other devices run as they are."""
