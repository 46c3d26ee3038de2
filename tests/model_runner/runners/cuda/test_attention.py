"""The attention kernels, interpreted, against attention in float64."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftwood_model_runner.runners.base import KVShape
from draftwood_model_runner.runners.cuda import tiling
from tests.model_runner.runners.cuda import reference
from tests.model_runner.runners.cuda.device import DEVICE
from tests.model_runner.runners.cuda.reference import random_batch

TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of numbers of about 1."""

rows = st.tuples(st.sampled_from([0, 1, 15, 16, 17, 64, 130, 300]), st.integers(1, 40), st.integers(0, 40))
attended = functools.partial(reference.attended, device=DEVICE)


def check(output: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.isfinite(output).all()
    assert (output.double() - expected).abs().max() < TOLERANCE[output.dtype]


@pytest.mark.timeout(300)
@given(
    batch=st.lists(rows, min_size=1, max_size=4),
    seed=st.integers(0, 2**32 - 1),
    deep=st.sampled_from([0.0, 0.5, 0.95]),
    group=st.sampled_from([1, 2, 3, 7]),
    window=st.sampled_from([None, 1, 20, 100]),
    many_rows=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    exact=st.booleans(),
)
@settings(max_examples=8, derandomize=True, suppress_health_check=[*HealthCheck])
def test_ragged_batches(
    batch: list[tuple[int, int, int]],
    seed: int,
    deep: float,
    group: int,
    window: int | None,
    many_rows: bool,
    dtype: torch.dtype,
    exact: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In exact mode with short runs, so that short contexts have several."""
    monkeypatch.setattr(tiling, "EXACT_RUN", 64)
    random = np.random.default_rng(seed)
    step, pages = random_batch(random, batch, deep)
    options: dict[str, Any] = {"window": window, "many_rows": many_rows, "padding": seed % 3, "exact": exact}
    check(*attended(step, pages, KVShape(2, 16, 16), group, dtype, random, **options))


@pytest.mark.parametrize(
    ("rows", "shape", "group", "options"),
    [
        *(([(33, 1, 5), (0, 3, 0)], KVShape(1, size, size), 2, {}) for size in (64, 80, 96, 128, 192, 256)),
        *(([(1500, 1, 20)], KVShape(1, 16, 16), 1, {"programs": programs}) for programs in (1, 2, 16)),
        ([(20, 2, 9)], KVShape(2, 48, 32), 1, {}),  # values of another size than keys, as with latent attention
        *(([(70, 1, n), (5, 1, 0)], KVShape(1, 16, 16), 2, {"many_rows": True}) for n in (1, 64, 65, 256)),
        ([(40, 1, 12), (0, 1, 0), (3, 17, 4)], KVShape(2, 16, 16), 2, {"softcap": 2.0}),
        ([(40, 1, 12), (0, 1, 0), (3, 17, 4)], KVShape(2, 16, 16), 2, {"window": 9, "sinks": [0.5, -1.0, 3.0, 0.0]}),
    ],
)
def test_shapes_trees_of_several_words_softcap_and_sinks(
    rows: list[tuple[int, int, int]], shape: KVShape, group: int, options: dict[str, Any]
) -> None:
    random = np.random.default_rng(0)
    step, pages = random_batch(random, rows, 0.6)
    if "sinks" in options:
        options = options | {"sinks": torch.tensor(options["sinks"], device=DEVICE)}
    check(*attended(step, pages, shape, group, torch.float32, random, **options))
