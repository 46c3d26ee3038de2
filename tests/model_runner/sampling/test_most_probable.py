"""One pass over the logits finds what torch's `argmax` and `topk` find, and orders what they leave open."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood_model_runner.sampling.most_probable import most_probable

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@given(
    rows=st.integers(1, 5),
    vocab=st.integers(1, 400),
    k=st.integers(0, 12),
    dtype=st.sampled_from(DTYPES),
    values=st.sampled_from([3, 50, 10**9]),
    seed=st.integers(0, 2**32 - 1),
)
def test_as_torch_finds_them(rows: int, vocab: int, k: int, dtype: torch.dtype, values: int, seed: int) -> None:
    """With few different values, most tokens are as probable as others."""
    k = min(k, vocab)
    rng = np.random.default_rng(seed)
    scores = (rng.integers(0, values, (rows, vocab)) - values / 2) * rng.choice([1e-4, 0.3, 50.0])
    logits = torch.from_numpy(scores).to(dtype)
    tokens, top = most_probable(logits, k)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == logits.argmax(-1).tolist()
    if k == 0:
        assert top is None
        return
    assert top is not None
    assert top.dtype == np.int32
    found = torch.from_numpy(top).long()
    assert torch.equal(logits.gather(1, found), logits.topk(k).values)
    assert all(len(set(row)) == k for row in top.tolist())


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_of_equally_probable_tokens_the_lowest_id_comes_first(dtype: torch.dtype) -> None:
    logits = torch.zeros(2, 300, dtype=dtype)
    logits[0, [290, 70, 5, 131]] = 2.5
    logits[1] = -torch.inf
    logits[1, [299, 64]] = -1.5
    tokens, top = most_probable(logits, 6)
    assert top is not None
    assert top.tolist() == [[5, 70, 131, 290, 0, 1], [64, 299, 0, 1, 2, 3]]
    assert tokens.tolist() == [5, 64]


def test_a_model_gone_wrong_still_gives_tokens() -> None:
    tokens, top = most_probable(torch.full((2, 100), torch.nan), 3)
    assert top is not None
    assert ((top >= 0) & (top < 100)).all()
    assert (tokens == top[:, 0]).all()
