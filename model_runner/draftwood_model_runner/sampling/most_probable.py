"""The most probable tokens of each row of logits, in one pass over them: torch's `argmax` and `topk` take several times
as long. Rows are divided among threads where there are enough logits."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from draftwood_model_runner.sampling.selection import BLOCK, LEAST_KEY, find_greatest, key_of_bits
from draftwood_strategies.arrays import Float32Array, Int32Array, Int64Array, Integer
from draftwood_strategies.native import compiled
from draftwood_strategies.threads import LEAST_NUMBERS, in_threads, parts

_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def most_probable(
    logits: torch.Tensor | npt.NDArray[np.float32], k: int, threads: int = 1
) -> tuple[Int32Array, Int32Array | None]:
    """The most probable token of each row, and the k most probable ones.

    Args:
        logits: [row, vocab].
        k: in [0, vocab].
        threads: at most.

    Returns:
        int32[row], of equally probable tokens the one with the lowest id, as torch's `argmax`; and int32[row, k], the
        best first, likewise, None for k = 0.
    """
    if isinstance(logits, np.ndarray):
        bits = logits.view(np.int32)
    elif logits.device.type == "cpu" and logits.dtype in _BITS:
        bits = logits.view(_BITS[logits.dtype]).numpy()
    else:
        best = logits.argmax(-1).to(torch.int32).cpu().numpy()
        if k == 0:
            return best, None
        ordered = torch.sort(logits, dim=-1, descending=True, stable=True).indices  # `topk` mixes ties
        return best, ordered[:, :k].to(torch.int32).cpu().numpy()
    best = np.zeros((bits.shape[0], max(k, 1)), np.int32)
    rows = [slice(part.start, part.stop) for part in parts(bits.shape[0], threads if bits.size >= LEAST_NUMBERS else 1)]
    in_threads([partial(_find, bits[part], best[part]) for part in rows], threads)
    return best[:, 0].copy(), best if k else None  # a copy, so that compiled functions see contiguous arrays only


def log_probabilities(logits: Any, top: Int32Array) -> Float32Array:
    """float32[r, k], of the tokens `top`, int32[r, k], by logits [r, vocab] of a runner."""
    if isinstance(logits, torch.Tensor):
        index = torch.from_numpy(top).long().to(logits.device)
        chosen = logits.float().gather(1, index) - logits.float().logsumexp(1, keepdim=True)
        on_host: Float32Array = chosen.cpu().numpy()
        return on_host
    best = np.take_along_axis(logits, top[:, :1].astype(np.int64), axis=1)
    sums = np.exp(logits - best).sum(axis=1, keepdims=True)
    found: Float32Array = np.take_along_axis(logits, top.astype(np.int64), axis=1) - best - np.log(sums)
    return found


def _find(bits: npt.NDArray[Any], best: Int32Array) -> None:
    greatest = np.empty(-(-bits.shape[1] // BLOCK), np.int32)
    _fill(bits, best, greatest, np.empty(best.shape[1], np.int64))


@compiled
def _fill(bits: npt.NDArray[Any], best: Int32Array, greatest: Int32Array, values: Int64Array) -> None:
    """Sets best[row] to the row's most probable tokens.

    Floats are compared as integers: compilers take the maximum of floats one by one, for the sake of NaN. Blocks of
    tokens whose greatest is not among the k greatest of all blocks are passed over.

    Args:
        bits: int[row, vocab], the bits of floats.
        greatest, values: workspace for so many blocks, and for k values.
    """
    vocab, k = bits.shape[1], best.shape[1]
    for row in range(bits.shape[0]):
        of_row = bits[row]
        find_greatest(of_row, greatest)
        filled = 0
        for block in range(greatest.shape[0]):
            key = np.int64(greatest[block])
            if filled == k and key <= values[k - 1]:
                continue
            values[_place(values, filled, key)] = key
            filled = min(filled + 1, k)
        threshold = values[k - 1] if filled == k else np.int64(LEAST_KEY)
        filled = 0
        for block in range(greatest.shape[0]):
            if greatest[block] < threshold:
                continue
            for token in range(block * BLOCK, min(vocab, (block + 1) * BLOCK)):
                value = np.int64(key_of_bits(of_row[token]))
                place = _place(values, filled, value)
                if place < k:
                    for behind in range(min(filled, k - 1), place, -1):
                        best[row, behind] = best[row, behind - 1]
                    values[place], best[row, place] = value, token
                    filled = min(filled + 1, k)


@compiled
def _place(values: Int64Array, filled: int, value: Integer) -> int:
    """Makes room for a value behind those that are as great; returns where, or k if it is not among the k greatest."""
    k = int(values.shape[0])
    if filled == k and value <= values[k - 1]:
        return k
    place = min(filled, k - 1)
    while place > 0 and values[place - 1] < value:
        values[place] = values[place - 1]
        place -= 1
    return place
