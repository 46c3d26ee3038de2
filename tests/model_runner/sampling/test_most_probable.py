"""One pass over the logits finds what torch's `argmax` and `topk` find, and orders what they leave open."""

from __future__ import annotations

import numpy as np
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
    """With few different values, most tokens are as probable as others; the lowest id comes first of these."""
    k = min(k, vocab)
    rng = np.random.default_rng(seed)
    scores = (rng.integers(0, values, (rows, vocab)) - values / 2) * rng.choice([1e-4, 0.3, 50.0])
    logits = torch.from_numpy(scores).to(dtype)
    logits[:, vocab // 2 :: 3] = -torch.inf
    expected = torch.argsort(logits, dim=-1, descending=True, stable=True)
    tokens, top = most_probable(logits, k)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == expected[:, 0].tolist()
    if k == 0:
        assert top is None
        return
    assert top is not None
    assert top.dtype == np.int32
    assert top.tolist() == expected[:, :k].tolist()


def test_a_model_gone_wrong_still_gives_tokens() -> None:
    tokens, top = most_probable(torch.full((2, 100), torch.nan), 3)
    assert top is not None
    assert ((top >= 0) & (top < 100)).all()
    assert (tokens == top[:, 0]).all()
