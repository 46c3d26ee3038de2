"""The tokens of a step as kernels of recurrent layers take them: one buffer at a fixed address, filled by one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch

from draftwood_model_runner.runners.base import StepBatch
from draftwood_model_runner.runners.cuda.device.buffer import DeviceBuffer
from draftwood_model_runner.runners.cuda.states.rows import PlannedRow
from draftwood_strategies.draft import Int32Array

_ROW = 9
"""Numbers of a batch row, see `kernels.states`."""
WALK = 4
"""Entries of `walk` for each token that steps at fixed addresses have room for: a token is on several paths of a tree,
and accepted nodes are replayed."""


class StateArrays:
    """The inputs of a step, for at most `tokens` tokens. See `kernels.states`.

    Attributes:
        buffer: all of them, on the device.
        row_count: int32[1].
        rows: int32[tokens, 9].
        token_rows, parents: int32[tokens]; -1 for padding.
        is_prompt: int32[tokens], 1 for tokens of a prompt.
        walk: int32[entries].
    """

    def __init__(self, tokens: int, entries: int, device: torch.device) -> None:
        self.capacity, self.entries = tokens, entries
        self.buffer = DeviceBuffer(
            {
                "row_count": (np.int32, (1,)),
                "rows": (np.int32, (tokens, _ROW)),
                "token_rows": (np.int32, (tokens,)),
                "parents": (np.int32, (tokens,)),
                "is_prompt": (np.int32, (tokens,)),
                "walk": (np.int32, (entries,)),
            },
            device,
            pieces=2,  # a step is filled in while the one before is in flight
        )

    def __getattr__(self, name: str) -> torch.Tensor:
        return self.buffer[name]

    def fill(self, layout: StateLayout, padded: int) -> None:
        """Copies a step to the device, where it is in place for what is launched afterwards on the current stream.

        Args:
            padded: tokens that the kernels will compute.
        """
        self.buffer.swap()
        host, n = self.buffer.host, layout.parents.size
        host["row_count"][0] = layout.rows.shape[0]
        host["rows"][: layout.rows.shape[0]] = layout.rows
        for name, values in (("token_rows", layout.token_rows), ("parents", layout.parents)):
            host[name][:n], host[name][n:padded] = values, -1
        host["is_prompt"][:n] = layout.is_prompt
        host["walk"][: layout.walk.size] = layout.walk
        self.buffer.send(until="walk", size=layout.walk.size)


class StateLayout:
    """The arrays of a step on the host, before it is known where they go.

    Attributes:
        rows: int32[S, 9].
        token_rows, parents, is_prompt: int32[T].
        walk: int32[entries].
    """

    def __init__(self, batch: StepBatch, planned: Sequence[PlannedRow]) -> None:
        sizes = np.diff(batch.cu_seqlens)
        offsets = np.repeat(batch.cu_seqlens[:-1], sizes)
        self.parents: Int32Array = np.where(batch.parents < 0, -1, batch.parents + offsets).astype(np.int32)
        self.token_rows: Int32Array = np.repeat(np.arange(len(planned), dtype=np.int32), sizes)
        self.is_prompt: Int32Array = np.zeros(batch.size, np.int32)
        self.rows: npt.NDArray[Any] = np.zeros((len(planned), _ROW), np.int32)
        parts: list[Int32Array] = []
        entries = 0
        for number, row in enumerate(planned):
            tokens = row.tokens
            self.is_prompt[tokens.prompt.start : tokens.prompt.stop] = 1
            walk = [np.array(row.accepted, np.int32)] if row.accepted else []
            if tokens.nodes:
                walk.append(paths(self.parents, tokens.nodes.start, tokens.nodes.stop))
            parts += walk
            end = entries + sum(part.size for part in walk)
            self.rows[number] = (
                *(row.source, row.target, row.end, row.page_end, tokens.chain.start, len(tokens.chain)),
                *(entries, len(row.accepted), end),
            )
            entries = end
        self.walk: Int32Array = np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def fits(self, arrays: StateArrays) -> bool:
        """Whether it can be filled in."""
        return self.parents.size <= arrays.capacity and self.walk.size <= arrays.entries


def paths(parents: Int32Array, begin: int, end: int) -> Int32Array:
    """The paths of a tree, from below its root to each leaf, one after the other: int32[...], each token times 2, plus
    1 for the first of a further path.

    Args:
        parents: int32[T], tokens of the step.
        begin, end: the nodes of the tree.
    """
    found: Int32Array = _paths(parents, begin, end)
    return found


@numba.njit(cache=True, nogil=True)
def _paths(parents: Int32Array, begin: int, end: int) -> Int32Array:
    inner = np.zeros(end - begin, np.bool_)
    depths = np.ones(end - begin, np.int32)
    for node in range(begin, end):
        above = parents[node]
        if above >= begin:
            inner[above - begin] = True
            depths[node - begin] = depths[above - begin] + 1
    walk = np.empty(np.sum(depths[~inner]), np.int32)
    at = 0
    for leaf in range(begin, end):
        if inner[leaf - begin]:
            continue
        node, depth = leaf, depths[leaf - begin]
        for i in range(depth - 1, -1, -1):
            walk[at + i] = 2 * node
            node = parents[node]
        if at > 0:
            walk[at] += 1
        at += depth
    return walk
