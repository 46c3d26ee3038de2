"""What the machine gives, and how products are kept to few widths."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.runners.torch.attention import BATCH
from draftwood_model_runner.runners.torch.kv_cache import KVCache
from draftwood_model_runner.runners.torch.machine import bound_kernel_caches, kernel_width
from draftwood_model_runner.runners.torch.torch_batch import TorchBatch
from draftwood_strategies import EMPTY_TREE
from tests.model_runner.families import served, torch_factory


def test_products_have_few_widths_and_little_is_added() -> None:
    widths = [kernel_width(rows) for rows in range(1, 5000)]
    assert all(width >= rows for rows, width in enumerate(widths, 1))
    assert all(width == rows for rows, width in enumerate(widths[:32], 1))
    assert all(width <= rows + rows // 8 for rows, width in enumerate(widths, 1))
    assert widths == sorted(widths)
    assert [kernel_width(width) for width in widths] == widths
    assert len({width for width in widths if width <= 512}) == 72


@pytest.mark.parametrize("size", [1, 33, 70])
def test_what_a_batch_is_filled_up_with_changes_nothing(size: int) -> None:
    factory = torch_factory(served("llama"))
    depths = np.arange(size, dtype=np.int32)
    tokens = (7 * depths + 3).astype(np.int32) % 250

    def logits(parts: list[slice]) -> torch.Tensor:
        kv, rows = KVCache(factory.layout, 100), []
        pages = np.arange(kv.pages, dtype=np.int32)
        for part in parts:
            n = len(tokens[part])
            batch = lay_out([BatchRow(pages, part.start, tokens[part], EMPTY_TREE, logits_from=0)])
            of_step = TorchBatch(batch, kv)
            inputs = of_step.inputs()
            assert inputs["input_ids"].shape == inputs["position_ids"].shape == (1, kernel_width(n))
            with torch.inference_mode(), BATCH.during(of_step):
                rows.append(factory.module(**inputs).logits[0, :n])
        return torch.cat(rows)

    together, one_by_one = logits([slice(0, size)]), logits([slice(i, i + 1) for i in range(size)])
    torch.testing.assert_close(together, one_by_one, rtol=1e-4, atol=1e-4)  # rounding differs by width and machine


def test_kernels_are_bounded_unless_the_user_bounds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"LRU_CACHE_CAPACITY": "7"})
    bound_kernel_caches(shapes=4)
    assert os.environ == {"LRU_CACHE_CAPACITY": "7", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "320"}
