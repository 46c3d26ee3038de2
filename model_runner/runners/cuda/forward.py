"""One forward pass on the device: what goes in, what is launched, what comes out."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from model_runner.runners.base import Predictions, StepBatch
from model_runner.runners.cuda.attention import STEP, AttentionStep, Scratch, power_of_2
from model_runner.runners.cuda.kernels.top_tokens import top_of_blocks, top_of_rows
from model_runner.runners.cuda.kv_cache import KVPages
from model_runner.runners.cuda.launching import launch, machine
from model_runner.runners.cuda.step_arrays import StepArrays
from model_runner.runners.cuda.tiling import Division, Tiles, divide
from model_runner.runners.most_probable import most_probable

TOP = 8
"""Most probable tokens that each step gives: what token recycling keeps of each row."""
_WORDS = 4
"""Ancestor words of a token in steps of usual size: trees of 256 nodes."""
_FEW_ROWS, _MANY_ROWS = 16, 64
"""Rows of a part of attention: 16 is the least that tensor cores multiply; with 64 a draft tree reads its context once."""
_PAGES = 4
"""Entries of the page tables of a step, for each page of KV memory. More are rare: prefixes are shared."""
_VOCAB_BLOCK = 4096


class Ready(NamedTuple):
    """A step whose inputs are on their way to the device.

    Attributes:
        arrays: which hold them.
        tokens: T, after padding.
        logit_rows: R, after padding; `wanted` without.
        rows: of a part of attention.
    """

    arrays: StepArrays
    scratch: Scratch
    tokens: int
    logit_rows: int
    wanted: int
    rows: int
    in_place: bool


class Results:
    """What a step leaves: logits on the device, and the most probable tokens on the host.

    Args:
        rows: capacity in rows of logits.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.top = torch.zeros((rows, TOP), dtype=torch.int32, device=device)
        self.host_top = torch.zeros((rows, TOP), dtype=torch.int32, pin_memory=device.type == "cuda")


class Forward:
    """Steps of one model. Steps of up to `tokens` tokens use arrays at fixed addresses, so that graphs can be replayed.

    Args:
        group: heads that share a key, at most.
        tokens: capacity of the fixed arrays.
    """

    def __init__(self, module: Any, kv: KVPages, group: int, device: torch.device, tokens: int) -> None:
        self._module, self._kv, self.device = module, kv, device
        self._group, self._machine = group, machine(device)
        shapes = tuple(kv.by_shape)
        self._shapes = shapes
        self._kv_heads = min(shape.kv_heads for shape in shapes)
        few = self._rows(_FEW_ROWS)
        most = self._division(few).most_parts(tokens)
        self._fixed = StepArrays(tokens, _WORDS, most, _PAGES * kv.pages, device)
        self._scratch = Scratch(shapes, most * few, device)
        self._results = Results(tokens, device)
        self._large: tuple[StepArrays, Scratch] | None = None
        self.logits: torch.Tensor | None = None

    @property
    def row_choices(self) -> tuple[int, ...]:
        """Rows that parts of attention have."""
        return tuple(sorted({self._rows(_FEW_ROWS), self._rows(_MANY_ROWS)}))

    @property
    def fixed_memory(self) -> list[torch.Tensor]:
        """What a captured step reads and writes at the same addresses."""
        results = self._results
        return [*self._kv.layers, self._fixed.memory, self._scratch.sums, results.top, results.host_top]

    def prepare(self, batch: StepBatch) -> Ready:
        """Sends a step to the device."""
        wanted = batch.logit_rows.size
        many = batch.size * self._group > _FEW_ROWS * batch.rows
        for rows in reversed(self.row_choices if many else self.row_choices[:1]):
            tiles = divide(batch, self._division(rows))
            if self._fixed.fits(batch, tiles) and self._scratch.fits(tiles, rows):
                tokens = padded_size(batch.size)
                self._fixed.fill(batch, tiles, tokens)
                return Ready(self._fixed, self._scratch, tokens, tokens, wanted, rows, True)
        arrays, scratch = self._enough(batch, tiles, rows)
        arrays.fill(batch, tiles, batch.size)
        return Ready(arrays, scratch, batch.size, wanted, wanted, rows, False)

    def prepare_padding(self, tokens: int, rows: int) -> Ready:
        """A step of so many tokens that are all padding."""
        none = np.zeros(0, np.int32)
        zero = np.zeros(1, np.int32)
        batch = StepBatch(none, none, none, zero, none, none, zero, none)
        tiles = Tiles(none.reshape(0, 8), none.reshape(0, 3), none, np.zeros((0, 1), np.int64), none)
        self._fixed.fill(batch, tiles, tokens)
        return Ready(self._fixed, self._scratch, tokens, tokens, 0, rows, True)

    def run(self, ready: Ready) -> None:
        """Launches a step."""
        self.logits = self.launch(ready)

    def launch(self, ready: Ready) -> torch.Tensor:
        """Launches a step; returns its logits [R, vocab]."""
        arrays, tokens = ready.arrays, ready.tokens
        step = AttentionStep(self._kv, arrays, ready.scratch, self._machine, ready.rows)
        token = STEP.set(step)
        try:
            logits: torch.Tensor = self._module(
                input_ids=arrays.tokens[None, :tokens].long(),
                position_ids=arrays.positions[None, :tokens].long(),
                logits_to_keep=arrays.logit_rows[: ready.logit_rows].long(),
                use_cache=False,
            ).logits[0]
        finally:
            STEP.reset(token)
        if ready.logit_rows <= self._results.top.shape[0]:
            self._find_top(logits, arrays.row_count)
        return logits

    def predictions(self, ready: Ready, top_k: int) -> Predictions:
        """What a step that was launched predicts; waits for the device."""
        logits = self.logits
        assert logits is not None
        logits = logits[: ready.wanted]
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        if top_k > TOP or ready.logit_rows > self._results.top.shape[0]:
            return Predictions(logits, *most_probable(logits, top_k))
        top = self._results.host_top[: ready.wanted].numpy().copy()
        return Predictions(logits, top[:, 0].copy(), top[:, :top_k].copy() if top_k else None)

    def _find_top(self, logits: torch.Tensor, wanted: torch.Tensor) -> None:
        rows, vocab = logits.shape
        if not rows:
            return
        blocks = -(-vocab // _VOCAB_BLOCK)
        best = torch.empty((rows, blocks, TOP), dtype=torch.int64, device=self.device)
        launch(
            top_of_blocks,
            (rows, blocks),
            *(logits, best, wanted, vocab, logits.stride(0), blocks),
            BLOCK=_VOCAB_BLOCK,
            TOP=TOP,
        )
        count = blocks * TOP
        results = self._results
        launch(
            top_of_rows,
            (rows,),
            *(best, results.top, wanted, count),
            SIZE=power_of_2(count),
            TOP=TOP,
        )
        results.host_top[:rows].copy_(results.top[:rows], non_blocking=True)

    def _rows(self, rows: int) -> int:
        """Rows of a part: enough for the heads of one group."""
        return max(rows, power_of_2(self._group))

    def _division(self, rows: int) -> Division:
        return Division(rows // self._group, -(-self._machine.programs // self._kv_heads))

    def _enough(self, batch: StepBatch, tiles: Tiles, rows: int) -> tuple[StepArrays, Scratch]:
        """Arrays for a step that the fixed ones do not hold."""
        large = self._large
        parts = tiles.parts.shape[0]
        if large is None or not large[0].fits(batch, tiles) or not large[1].fits(tiles, rows):
            tokens, words = padded_size(batch.size), tiles.words.shape[1]
            arrays = StepArrays(tokens, words, parts + tokens, 2 * batch.pages.size, self.device)
            self._large = large = arrays, Scratch(self._shapes, parts * rows * 5 // 4, self.device)
        return large


SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)


def padded_size(tokens: int) -> int:
    """The number of tokens that a step of so many is filled up to."""
    for size in SIZES:
        if size >= tokens:
            return size
    return -(-tokens // 512) * 512
