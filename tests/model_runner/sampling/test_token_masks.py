"""Packed masks on logits: the tokens that they allow keep their scores, in any vocabulary; found by several threads."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood_model_runner.request import SamplingParams
from draftwood_model_runner.sampling import metadata
from draftwood_model_runner.sampling.metadata import Adjustments, SamplingTensors, SequenceSampling, TokenMasks
from draftwood_model_runner.sampling.token_sampler import forbid

NONE = np.zeros(0, np.int32)


@given(st.integers(1, 300), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_what_is_not_allowed_becomes_minus_infinity(vocab: int, seed: int, share: float) -> None:
    random = np.random.default_rng(seed)
    allowed = np.zeros(-(-vocab // 32) * 32, np.bool_)
    allowed[:vocab] = random.random(vocab) < share
    scores = random.standard_normal(vocab).astype(np.float32)
    expected = np.where(allowed[:vocab], scores, np.float32(-np.inf))
    forbid(np.packbits(allowed, bitorder="little").tobytes(), scores)
    assert scores.tolist() == expected.tolist()


def test_masks_of_several_sequences_are_found_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "usable_cpus", lambda: 4)
    together = threading.Barrier(4, timeout=30)

    def masks(sequence: int) -> TokenMasks:
        together.wait()  # passes only if four are found at the same time
        return TokenMasks(np.array([0, -2], np.int32), np.full((1, 2), sequence, np.int32))

    adjustments = Adjustments(NONE, NONE, NONE.astype(np.float32), NONE)
    sequences = [SequenceSampling(SamplingParams(), 0, adjustments, partial(masks, i)) for i in range(8)]
    offsets = np.arange(9, dtype=np.int32) * 2
    tensors = SamplingTensors.of(sequences, offsets[:-1], offsets[1:])
    assert tensors.masks.tolist() == [[i, i] for i in range(8)]
    assert tensors.row_masks.tolist() == [n for i in range(8) for n in (i, -2)]
