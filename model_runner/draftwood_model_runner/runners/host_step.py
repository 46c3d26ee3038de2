"""Steps that are computed when they begin, and whose draft trees the host verifies."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from typing import ClassVar

import numpy as np

from draftwood_model_runner.errors import DeviceMemoryError, ModelError
from draftwood_model_runner.runners.base import KVCompaction, Runner, StepBatch
from draftwood_model_runner.sampling.token_sampler import TokenSampler
from draftwood_model_runner.sampling.verification import AcceptedPath, verify
from draftwood_strategies.base import StepFeedback


class HostStep:
    """Implements `runners.base.StepInFlight` for a runner that is not asynchronous.

    Args:
        batch, top_k, samplers: as for `Runner.begin`.
        threads: that verify, at most.
    """

    can_overlap: ClassVar[bool] = False

    def __init__(
        self, runner: Runner, batch: StepBatch, top_k: int, samplers: SequenceOf[TokenSampler | None], threads: int
    ) -> None:
        started = time.perf_counter()
        self._logits, tokens, top_tokens = runner.step(batch, top_k)
        self._seconds = time.perf_counter() - started
        self._feedback = batch.feedback(tokens, top_tokens)
        self._runner, self._batch, self._samplers, self._threads = runner, batch, samplers, threads

    def wait(self) -> tuple[StepFeedback, float]:
        return self._feedback, self._seconds

    def verify(self, rows: SequenceOf[int]) -> list[AcceptedPath]:
        paths = verify(self._samplers, self._feedback, self._logits, rows, self._threads)
        compact(self._runner, self._batch, dict(zip(rows, paths, strict=True)))
        return paths


def compact(runner: Runner, batch: StepBatch, paths: dict[int, AcceptedPath]) -> None:
    """Moves keys and values of accepted paths, by batch row, behind the committed ones.

    Raises:
        ModelError: the device had no memory for it. No smaller step helps: what was accepted is not where it belongs.
        DeviceLostError: as `Runner.compact_kv`.
    """
    moving = {row: path.nodes for row, path in paths.items() if path.nodes and path.nodes[-1] >= len(path.nodes)}
    if not moving:
        return  # they are there
    slots = batch.slot_mapping(runner.page_size)
    sources, targets, offsets = list[int](), list[int](), [0]
    for row, nodes in moving.items():
        first = int(np.searchsorted(batch.logit_rows, batch.cu_seqlens[row]))
        draft = slots[int(batch.logit_rows[first]) + 1 : int(batch.cu_seqlens[row + 1])].tolist()
        for depth, node in enumerate(nodes):
            if node != depth:
                sources.append(draft[node])
                targets.append(draft[depth])
        offsets.append(len(sources))
    try:
        runner.compact_kv(KVCompaction(*(np.array(part, np.int32) for part in (sources, targets, offsets))))
    except DeviceMemoryError as error:
        raise ModelError(str(error)) from error
