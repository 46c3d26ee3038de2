"""One forward pass on the device: what goes in, what is launched, what comes out."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np
import torch

from draftwood_model_runner.runners.attention_hook import setting
from draftwood_model_runner.runners.base import KVShape, StepBatch
from draftwood_model_runner.runners.cuda.constants import LEAST_RUN, LEAST_RUN_OF_MANY, TOP_BLOCK
from draftwood_model_runner.runners.cuda.device.launching import PROGRAMS, Machine, launch, machine
from draftwood_model_runner.runners.cuda.kernels.top_tokens import top_of_blocks, top_of_rows
from draftwood_model_runner.runners.cuda.kv_cache import KVPages
from draftwood_model_runner.runners.cuda.states.arrays import WALK, StateArrays, StateLayout
from draftwood_model_runner.runners.cuda.states.memory import MixerStates
from draftwood_model_runner.runners.cuda.states.rows import PlannedRow
from draftwood_model_runner.runners.cuda.states.scan import DeviceStep
from draftwood_model_runner.runners.cuda.steps.attention import STEP, AttentionStep, Scratch, power_of_2
from draftwood_model_runner.runners.cuda.steps.exact_tiling import LEVELS, divide_exactly
from draftwood_model_runner.runners.cuda.steps.results import TOP, Results
from draftwood_model_runner.runners.cuda.steps.sampling import log_probabilities, sample_and_accept
from draftwood_model_runner.runners.cuda.steps.step_arrays import StepArrays
from draftwood_model_runner.runners.cuda.steps.tiling import NO_TILES, Division, Tiles, divide
from draftwood_model_runner.runners.logit_rows import logits_of_rows
from draftwood_model_runner.runners.states.mixers import STEP as MIXERS
from draftwood_model_runner.sampling.host.most_probable import most_probable
from draftwood_model_runner.sampling.metadata import SamplingMetadata

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


class Workspace:
    """What steps of up to `tokens` tokens read and write beside the model.

    Attributes:
        top: int32[tokens, TOP + 1], the most probable tokens after each row of logits, and the chosen one.
        state_arrays: for recurrent layers; None without.

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
    ) -> None:
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
        """As `StepArrays.fill`, with the arrays for recurrent layers."""
        self.arrays.fill(batch, tiles, padded, sampling)
        if self.state_arrays is not None and states is not None:
            self.state_arrays.fill(states, padded)


class PreparedStep(NamedTuple):
    """A step whose inputs are on their way to the device.

    Attributes:
        tokens: T, after padding.
        logit_rows: R, after padding; `wanted` without.
        rows: of a part of attention.
        fixed: its workspace is the one at fixed addresses.
    """

    workspace: Workspace
    tokens: int
    logit_rows: int
    wanted: int
    rows: int
    fixed: bool


class Forward:
    """Steps of one model. Those of up to `SIZES[-1]` tokens use memory at fixed addresses, so that graphs can be
    replayed.

    Attributes:
        logits: [R, vocab] of the latest step.

    Args:
        group: heads that share a key, at most.
        exact: the bits of a token's logits do not depend on the other tokens of its step.
        states: of each mixer.
    """

    def __init__(
        self,
        module: Any,
        kv: KVPages,
        group: int,
        device: torch.device,
        exact: bool = False,
        states: SequenceOf[MixerStates] = (),
    ) -> None:
        self._states = states
        self._module, self._kv, self.device, self._exact = module, kv, device, exact
        self._group, self._shapes = group, tuple(kv.by_shape)
        self._machine = machine(device, max(shape.key_dim for shape in self._shapes))
        self._kv_heads = min(shape.kv_heads for shape in self._shapes)
        few = self.row_choices[0]
        parts = self._division(few).most_parts(SIZES[-1]) * (_EXACT_PARTS if exact else 1)
        words, levels = (1, LEVELS) if exact else (_WORDS, 0)
        self._fixed = Workspace(
            self._shapes, SIZES[-1], words, parts, few, _PAGES * kv.pages, device, levels, self._walk(0)
        )
        self._large: Workspace | None = None
        self.logits: torch.Tensor | None = None

    @property
    def row_choices(self) -> tuple[int, ...]:
        """Rows that parts of attention have: enough for the heads of one group; few in float32, which takes twice the
        registers, and in exact mode, where their number must not depend on the step."""
        one = self._exact or next(iter(self._kv.layers.values())).dtype == torch.float32
        choices = (_FEW_ROWS,) if one else (_FEW_ROWS, _MANY_ROWS)
        return tuple(sorted({max(rows, power_of_2(self._group)) for rows in choices}))

    @property
    def fixed_memory(self) -> list[torch.Tensor]:
        """What a captured step reads and writes at the same addresses."""
        fixed = self._fixed
        memory = [*self._kv.layers.values(), fixed.arrays.buffer.memory, fixed.scratch.sums, fixed.top]
        if fixed.state_arrays is not None:
            memory += [fixed.state_arrays.buffer.memory, *(tensor for one in self._states for tensor in one.tensors)]
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
        many = batch.size * self._group > _FEW_ROWS * batch.rows
        for rows in reversed(self.row_choices if many else self.row_choices[:1]):
            tiles = divide_exactly(batch, rows // self._group) if self._exact else divide(batch, self._division(rows))
            if wanted <= _LOGIT_ROWS and self._fixed.fits(batch, tiles, rows, states):
                tokens = padded_size(batch.size)
                self._fixed.fill(batch, tiles, tokens, sampling, states)
                return PreparedStep(self._fixed, tokens, min(tokens, _LOGIT_ROWS), wanted, rows, fixed=True)
        if self._large is None or not self._large.fits(batch, tiles, rows, states):
            tokens, parts = padded_size(batch.size), tiles.parts.shape[0] * 5 // 4
            # At least as many words as in the others, so that the kernel is the same.
            words, levels = (
                max(tiles.ancestor_bitmask.shape[1], self._fixed.arrays.word_capacity),
                LEVELS if self._exact else 0,
            )
            self._large = Workspace(
                *(self._shapes, tokens, words, parts, rows, 2 * batch.block_table.size, self.device, levels),
                self._walk(0 if states is None else states.walk.size),
            )
        self._large.fill(batch, tiles, batch.size, sampling, states)
        return PreparedStep(self._large, batch.size, wanted, wanted, rows, fixed=False)

    def prepare_padding(self, tokens: int, rows: int) -> PreparedStep:
        """A step of so many tokens that are all padding."""
        none, zero = np.zeros(0, np.int32), np.zeros(1, np.int32)
        batch = StepBatch(none, none, none, zero, none, none, zero, none)
        self._fixed.fill(batch, NO_TILES, tokens, states=StateLayout(batch, []) if self._states else None)
        return PreparedStep(self._fixed, tokens, min(tokens, _LOGIT_ROWS), 0, rows, fixed=True)

    def launch(self, ready: PreparedStep) -> torch.Tensor:
        """Launches the model and finds the most probable tokens; returns the logits [R, vocab]."""
        workspace, tokens = ready.workspace, ready.tokens
        arrays = workspace.arrays
        step = AttentionStep(self._kv, arrays, workspace.scratch, self._machine, ready.rows)
        mixing = None
        if workspace.state_arrays is not None:
            mixing = DeviceStep(self._states, workspace.state_arrays, tokens, self._machine)
        with STEP.during(step), setting(MIXERS, mixing):
            logits = logits_of_rows(
                self._module,
                arrays.logit_rows[: ready.logit_rows].long(),
                input_ids=arrays.tokens[None, :tokens].long(),
                position_ids=arrays.positions[None, :tokens].long(),
                use_cache=False,
            )
        if ready.logit_rows:
            find_top(logits, workspace)
        return logits

    def sample(self, ready: PreparedStep, top_k: int, sampling: SamplingMetadata | None) -> Results:
        """Chooses the tokens after a step that was launched, and sends what it predicts to the host."""
        assert self.logits is not None
        wanted, workspace = ready.wanted, ready.workspace
        logits, logprobs = self.logits[:wanted], None
        if wanted and sampling is not None:
            sampled = workspace.top[:wanted, TOP]
            sample_and_accept(logits, sampled, workspace.arrays, sampling, self._kv)
            logprobs = log_probabilities(logits, sampled, workspace.arrays, sampling)
        host_top = workspace.next_host_top()[:wanted]
        host_top.copy_(workspace.top[:wanted], non_blocking=True)
        more = most_probable(logits, top_k)[1] if top_k > TOP else None  # waits
        return Results(logits, host_top, more, sampling is not None, logprobs)

    def _walk(self, entries: int) -> int:
        """Entries of `walk` in a workspace; 0 without recurrent layers."""
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


def find_top(logits: torch.Tensor, workspace: Workspace) -> None:
    """Sets `workspace.top` to the most probable tokens after each row of logits [R, vocab]."""
    rows, vocab = logits.shape
    blocks = -(-vocab // TOP_BLOCK)
    best = torch.empty((rows, blocks, TOP), dtype=torch.int64, device=logits.device)
    wanted = workspace.arrays.row_count
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
        *(best, workspace.top, wanted, blocks * TOP),
        SIZE=power_of_2(blocks * TOP),
        TOP=TOP,
    )


def padded_size(tokens: int) -> int:
    """The number of tokens that a step of so many is filled up to, where its arrays are at fixed addresses."""
    for size in SIZES:
        if size >= tokens:
            return size
    return -(-tokens // SIZES[-1]) * SIZES[-1]
