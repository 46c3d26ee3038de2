"""The arrays of a step on the device: one buffer at a fixed address, filled by one copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from model_runner.runners.base import StepBatch
from model_runner.runners.cuda.kv_cache import PAGE_SIZE
from model_runner.runners.cuda.tiling import Tiles

_ALIGNED = 16
"""Bytes: Triton compiles other code for pointers that are not."""


class StepArrays:
    """The inputs of a step, for at most `tokens` tokens. What the batch does not fill is padding, which no token sees.

    Attributes:
        memory: of all of them, on the device.
        tokens, positions, logit_rows, prefixes: int32[tokens], on the device.
        slots: int64[tokens]; -1 for padding.
        token_parts: int32[tokens, 3]; 0 parts for padding.
        words: int64[tokens, words].
        row_count, part_count: int32[1], rows of logits that are not padding, and parts of attention.
        parts: int32[most_parts, 8].
        pages: int32[pages], the page tables of all rows.

    Args:
        tokens: capacity in tokens.
        words: in ancestor words of a token.
        parts: in parts of attention.
        pages: in entries of page tables.
    """

    def __init__(self, tokens: int, words: int, parts: int, pages: int, device: torch.device) -> None:
        fields: dict[str, tuple[type[Any], tuple[int, ...]]] = {
            "tokens": (np.int32, (tokens,)),
            "positions": (np.int32, (tokens,)),
            "logit_rows": (np.int32, (tokens,)),
            "prefixes": (np.int32, (tokens,)),
            "slots": (np.int64, (tokens,)),
            "token_parts": (np.int32, (tokens, 3)),
            "words": (np.int64, (tokens, words)),
            "part_count": (np.int32, (1,)),
            "row_count": (np.int32, (1,)),
            "parts": (np.int32, (parts, 8)),
            "pages": (np.int32, (pages,)),
        }
        self.capacity, self.page_capacity, self.word_capacity, self.part_capacity = tokens, pages, words, parts
        offsets, size = {}, 0
        for name, (kind, shape) in fields.items():
            offsets[name] = size
            size += -(-int(np.prod(shape)) * np.dtype(kind).itemsize // _ALIGNED) * _ALIGNED
        self._pages_at = offsets["pages"]
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self._views: dict[str, npt.NDArray[Any]] = {}
        raw = self._host.numpy()
        for name, (kind, shape) in fields.items():
            length = int(np.prod(shape)) * np.dtype(kind).itemsize
            self._views[name] = raw[offsets[name] : offsets[name] + length].view(kind).reshape(shape)
            part = self.memory[offsets[name] : offsets[name] + length]
            tensor = part.view(torch.int32 if kind is np.int32 else torch.int64).view(shape)
            setattr(self, name, tensor)

    tokens: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    prefixes: torch.Tensor
    slots: torch.Tensor
    token_parts: torch.Tensor
    words: torch.Tensor
    part_count: torch.Tensor
    row_count: torch.Tensor
    parts: torch.Tensor
    pages: torch.Tensor

    def fits(self, batch: StepBatch, tiles: Tiles) -> bool:
        """Whether a step can be filled in."""
        return (
            batch.size <= self.capacity
            and batch.pages.size <= self.page_capacity
            and tiles.words.shape[1] <= self.word_capacity
            and tiles.parts.shape[0] <= self.part_capacity
        )

    def fill(self, batch: StepBatch, tiles: Tiles, padded: int) -> None:
        """Copies a step to the device, where it is in place for what is launched afterwards on the current stream.

        The copy before must have ended, as it has when the predictions of its step are known.

        Args:
            padded: tokens and rows of logits that the kernels will compute.
        """
        host, n, rows = self._views, batch.size, batch.logit_rows.size
        host["tokens"][:n], host["tokens"][n:padded] = batch.tokens, 0
        host["positions"][:n], host["positions"][n:padded] = batch.positions, 0
        host["logit_rows"][:rows], host["logit_rows"][rows:padded] = batch.logit_rows, 0
        host["prefixes"][:n] = tiles.prefixes
        host["slots"][:n], host["slots"][n:padded] = batch.kv_slots(PAGE_SIZE), -1
        host["token_parts"][:n], host["token_parts"][n:padded] = tiles.token_parts, 0
        host["words"][:n, : tiles.words.shape[1]] = tiles.words
        host["part_count"][0], host["row_count"][0] = tiles.parts.shape[0], rows
        host["parts"][: tiles.parts.shape[0]] = tiles.parts
        host["pages"][: batch.pages.size] = batch.pages
        end = self._pages_at + 4 * batch.pages.size
        self.memory[:end].copy_(self._host[:end], non_blocking=True)
