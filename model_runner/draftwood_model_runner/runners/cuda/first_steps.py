"""The first steps of a runner: compile the kernels that steps launch beside the model, so that no request waits for it.

Triton compiles a kernel for each value of its constants when it is first launched, which takes up to seconds. Those of
the model are compiled when steps are captured; those that choose tokens and accept paths depend on the requests.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from draftwood_model_runner.request import SamplingParams
from draftwood_model_runner.runners.base import Predictions, Runner, StepBatch
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.runners.cuda.steps.results import LaunchedStep
from draftwood_model_runner.sampling.metadata import (
    MOST_PROBABLE,
    NO_MASK,
    Adjustments,
    SamplingMetadata,
    SequenceSampling,
    TokenMasks,
)
from draftwood_strategies.draft import DraftTree

_TREES = (1, 31, 63, 127, 255)
"""Nodes, of which each has another block size of `accept_paths`."""


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
    one = np.zeros(1, np.int32)
    adjustments = Adjustments(one, one, one.astype(np.float32), one)
    return SequenceSampling(SamplingParams(1.0, 2, 0.9, 0.1, 1.1, 0.1, 0.1), 0, adjustments, masks)
