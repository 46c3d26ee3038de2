"""Keys, values and masks of the torch runner: any pieces compute the same, in bounded memory."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from draftwood_model_runner.runners.base import KVCompaction, KVShape, StepBatch
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.runners.shrinking import randomized
from draftwood_model_runner.runners.torch import attention as torch_batch
from draftwood_model_runner.runners.torch.kv_cache import PAGE_SIZE, KVCache, KVLayout, StepEntries
from draftwood_model_runner.runners.torch.probe import probe
from draftwood_model_runner.runners.torch.runner import forward
from draftwood_model_runner.runners.trials import path_with_wrong_siblings
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.draft import EMPTY_TREE
from tests.model_runner.small_models import TINY, build

SHAPES = (KVShape(3, 4, 5), KVShape(1, 6, 2), KVShape(3, 4, 5))
LAYOUT = KVLayout(SHAPES, torch.float32, torch.device("cpu"))


def chain(pages: Int32Array, context: int, count: int) -> BatchRow:
    return BatchRow(pages, context, np.zeros(count, np.int32), EMPTY_TREE, logits_from=count)


def write(kv: KVCache, batch: StepBatch, values: list[int]) -> StepEntries:
    """Fills the entries of the step in every layer with these values, negative ones in the values."""
    entries = StepEntries(kv, batch)
    column = torch.tensor(values, dtype=torch.float32)[None, :, None]
    for layer, (heads, key_dim, value_dim) in enumerate(SHAPES):
        entries.write(layer, column.expand(heads, -1, key_dim), -column.expand(heads, -1, value_dim))
    return entries


def read(entries: StepEntries, row: int, count: int) -> list[float]:
    actual: list[float] = []
    for layer, (heads, key_dim, value_dim) in enumerate(SHAPES):
        keys, values = entries.read(layer, row)
        actual = keys[0, :count, 0].tolist()
        column = torch.tensor(actual)[None, :, None]
        assert torch.equal(keys[:, :count], column.expand(heads, -1, key_dim))
        assert torch.equal(values[:, :count, :value_dim], -column.expand(heads, -1, value_dim))
    return actual


@given(st.integers(0, 10), st.sets(st.integers(0, 19)).map(sorted), st.permutations(range(4)))
def test_keeps_the_accepted_entries_in_order(committed: int, accepted: list[int], order: list[int]) -> None:
    kv = KVCache(LAYOUT, 4 * PAGE_SIZE)
    pages, others = np.array(order[:2], np.int32), np.array(order[2:], np.int32)
    write(kv, lay_out([chain(pages, 0, committed + 20), chain(others, 0, 20)]), [*range(committed + 20), *range(20)])
    slots = lay_out([chain(pages, 0, 2 * PAGE_SIZE)]).slot_mapping(PAGE_SIZE).astype(np.int32)
    moves = [(committed + row, committed + i) for i, row in enumerate(accepted) if row != i]
    sources, targets = slots[np.array(moves, np.int32).reshape(-1, 2).T]
    kv.move(KVCompaction(sources, targets, np.array([0, len(moves)], np.int32)))
    entries = StepEntries(kv, lay_out([chain(pages, 0, committed + 20), chain(others, 0, 20)]))
    expected = [*range(committed), *(committed + row for row in accepted)]
    assert read(entries, 0, len(expected)) == expected
    assert read(entries, 1, 20) == [*range(20)]


@pytest.mark.parametrize("exact", [False, True])
def test_a_token_costs_what_the_layout_says(exact: bool) -> None:
    layout = KVLayout((KVShape(3, 4, 5), KVShape(1, 6, 2)), torch.float32, torch.device("cpu"), exact=exact)
    kv = KVCache(layout, PAGE_SIZE + 1)
    assert kv.pages == 2
    assert layout.bytes_per_token * 2 * PAGE_SIZE == sum(layer.nbytes for layer in (*kv.keys, *kv.values))


CONTEXT, CHUNK, PATH = 150, 90, 6
_WINDOW: dict[str, Any] = {"sliding_window": 40}
CONFIGS: dict[str, Any] = {
    "llama": lambda: tf.LlamaConfig(**TINY),
    "mistral-sliding": lambda: tf.MistralConfig(**TINY, **_WINDOW, num_key_value_heads=2),
    "gemma2": lambda: tf.Gemma2Config(**TINY, **_WINDOW, num_key_value_heads=2, head_dim=16),  # soft-capping
    "gpt-oss": lambda: tf.GptOssConfig(  # sinks
        **TINY, **_WINDOW, num_key_value_heads=2, head_dim=16, num_local_experts=4
    ),
}


def served(family: str, exact: bool) -> tuple[Any, KVLayout]:
    module = randomized(build(CONFIGS[family]()))
    return module, probe(module, exact=exact, max_context=512)


TOKENS = np.random.default_rng(3).integers(0, 128, CONTEXT + CHUNK + PATH, np.int32)


def table(kv: KVCache) -> Int32Array:
    return np.arange(kv.pages, dtype=np.int32)


@torch.inference_mode()
def computed(module: Any, layout: KVLayout) -> list[torch.Tensor]:
    """Logits of a prompt in two chunks, and over a tree behind it, beside another sequence."""
    kv = KVCache(layout, 2 * (CONTEXT + CHUNK + 4 * PATH))
    mine, other = table(kv)[: kv.pages // 2], table(kv)[kv.pages // 2 :]
    begin, actual = 0, []
    for end in (CONTEXT, CONTEXT + CHUNK):
        chunk = BatchRow(mine, begin, TOKENS[begin:end], EMPTY_TREE, 0)
        actual.append(forward(module, lay_out([chunk]), kv)[: end - begin])
        begin = end
    tree = path_with_wrong_siblings(TOKENS[begin + 1 :], 128)
    beside = BatchRow(other, 0, TOKENS[:20], EMPTY_TREE, 19)
    drafted = BatchRow(mine, begin, TOKENS[begin : begin + 1], tree, 0)
    actual.append(forward(module, lay_out([beside, drafted]), kv)[1 : 2 + len(tree)])
    return actual


@pytest.mark.parametrize("numbers", [1, 500, 20_000])
@pytest.mark.parametrize(
    ("family", "exact"), [("llama", True), ("gemma2", True), *((family, False) for family in CONFIGS)]
)
def test_pieces_compute_the_same(family: str, exact: bool, numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In exact mode to the last bit. Of 1 number, each token has a mask of its own; 20,000 are in between."""
    module, layout = served(family, exact)
    assert layout.exact == exact
    expected = computed(module, layout)
    monkeypatch.setattr(torch_batch, "MASK_NUMBERS", numbers)
    actual = computed(module, layout)
    for logits, plain in zip(actual, expected, strict=True):
        if exact:
            assert torch.equal(logits, plain)
        torch.testing.assert_close(logits, plain, rtol=1e-4, atol=1e-4)
    along = [0, *range(1, 2 * (PATH - 1), 2)]
    with torch.inference_mode():
        module.set_attn_implementation("eager")
        plain = module(input_ids=torch.from_numpy(TOKENS.astype(np.int64))[None], use_cache=False).logits[0]
    torch.testing.assert_close(actual[-1][along], plain[-PATH:], rtol=1e-3, atol=1e-3)


class _Sizes(TorchDispatchMode):
    """Notes the most numbers of a matrix that any operation makes, as masks are, but for views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and not tensor._is_view():
                self.largest = max(self.largest, tensor.numel())
        return made


@pytest.mark.parametrize(
    ("family", "count", "most"),
    [("llama", 512, torch_batch.MASK_NUMBERS), ("mistral-sliding", 128, 128 * (128 + 40 + PAGE_SIZE))],
)
def test_masks_of_a_long_context_are_bounded(family: str, count: int, most: int) -> None:
    """A chunk of 512 tokens at 131,072: a mask of the whole would have 67 million numbers, 268 MB; one of a window of
    40 tokens has none for what is behind it."""
    module, layout = served(family, False)
    kv = KVCache(layout, 131_072 + 2 * PAGE_SIZE + 512)
    for memory in (*kv.keys, *kv.values):
        memory[:, ::997] = 0.5  # the rest stays as the system gives it: zeros
    tokens = np.random.default_rng(0).integers(0, 128, count, np.int32)
    batch = lay_out([BatchRow(table(kv), 131_072, tokens, EMPTY_TREE, count - 1)])
    tracemalloc.start()
    with torch.inference_mode(), _Sizes() as sizes:
        forward(module, batch, kv)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.5 * most < sizes.largest <= most
    assert peak < 8 << 20, "arrays of NumPy"


def test_masks_that_are_kept_are_bounded_over_all_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_batch, "MASK_NUMBERS", 10_000)
    _, layout = served("llama", False)
    kv = KVCache(layout, 64 * 80)
    tree = path_with_wrong_siblings(np.arange(10, dtype=np.int32), 128)
    rows = [BatchRow(table(kv)[i * 5 : (i + 1) * 5], 40, np.zeros(1, np.int32), tree, 0) for i in range(60)]
    batch = torch_batch.TorchBatch(lay_out(rows), kv)
    assert all(batch.mask(row, None, slice(0, 1 + len(tree))) is not None for row in range(60))
    assert sum(mask.numel() for mask in batch._masks.values()) <= 10_000
