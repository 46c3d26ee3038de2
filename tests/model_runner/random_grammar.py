"""A grammar for tests: which tokens may come next is random, but depends on the output so far alone."""

from __future__ import annotations

import zlib
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
import numpy.typing as npt

from draftwood_model_runner.sampling.metadata import UNKNOWN_MASK, TokenMasks
from draftwood_strategies.arrays import Int32Array


class RandomGrammar:
    """Implements `sequence.Grammar`; allows about `share` of the tokens at each place.

    Args:
        known: masks that `masks` finds, the others are unknown.
    """

    slow = complete = False
    pending: Future[bytes] | None = None

    def __init__(self, vocab: int, share: float = 0.5, known: int = 1_000) -> None:
        self._vocab, self._share, self._known = vocab, share, known
        self.written: list[int] = []

    def prepare(self, threads: Executor) -> None:
        """Nothing: it is never slow."""

    def copy(self) -> RandomGrammar:
        other = RandomGrammar(self._vocab, self._share, self._known)
        other.written = [*self.written]
        return other

    def allows(self, token: int) -> bool:
        return bool(self._allowed(self.written)[token])

    def mask(self, scores: Any) -> None:
        scores[~self._allowed(self.written)] = -np.inf

    def masks(self, tokens: Int32Array, parents: Int32Array) -> TokenMasks:
        rows = np.full(tokens.size, UNKNOWN_MASK, np.int32)
        paths, bits = [self.written], list[npt.NDArray[np.int32]]()
        for node in range(tokens.size):
            if node:
                paths.append([*paths[parents[node]], int(tokens[node])])
            if len(bits) < self._known:
                rows[node] = len(bits)
                padded = np.zeros(-(-self._vocab // 32) * 32, np.uint8)
                padded[: self._vocab] = self._allowed(paths[node])
                bits.append(np.packbits(padded, bitorder="little").view(np.int32))
        return TokenMasks(rows, np.array(bits, np.int32).reshape(len(bits), -(-self._vocab // 32)))

    def accept(self, token: int) -> None:
        self.written.append(token)

    def forced(self) -> list[int]:
        return []

    def _allowed(self, written: list[int]) -> npt.NDArray[np.bool_]:
        random = np.random.default_rng(zlib.crc32(str(written).encode()))
        return random.random(self._vocab) < self._share
