"""Exact mode: the bits of what is computed of a token do not depend on drafts and batch."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from draftwood_model_runner.errors import InvalidValueError, UnsupportedRunnerError
from draftwood_model_runner.loading.model import BUNDLED_MODEL, load_model
from draftwood_model_runner.request import SamplingParams
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.runners.cuda import factory, tiling
from draftwood_model_runner.runners.cuda.layers import exact_linear, make_exact
from draftwood_model_runner.runners.cuda.memory import PAGE_SIZE
from draftwood_model_runner.runners.cuda.runner import CudaRunner
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.draft import EMPTY_TREE, DraftTree
from tests.model_runner.families import VOCAB, taken_over
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.runners.cuda.device import DEVICE
from tests.model_runner.runners.cuda.test_lossless import PROMPTS, run, small, written
from tests.model_runner.sequences import GREEDY

RUN = 64
"""Entries of a run here, so that short contexts have several."""


@pytest.fixture(autouse=True)
def _short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "EXACT_RUN", RUN)


@functools.cache
def exact_model(family: str, dtype: torch.dtype) -> Any:
    """Taken over by the runner; the tokenizer is not used."""
    model = taken_over(small(family).to(DEVICE, dtype), exact=True, runner="cuda")
    assert model.exact
    return model


@pytest.mark.parametrize(
    "dtype", [*(pytest.param(each, marks=pytest.mark.slow) for each in (torch.float32, torch.float16)), torch.bfloat16]
)
def test_bits_of_a_path_in_a_random_tree(dtype: torch.dtype) -> None:
    """A deep tree over the end of a run, beside another sequence, against one token after the other."""
    factory, random = exact_model("llama", dtype).factory, np.random.default_rng(2)
    runner = CudaRunner(factory.module, factory.layout, 64 * PAGE_SIZE, graphs=False)
    context = random.integers(0, VOCAB, RUN - 3).astype(np.int32)
    tree = DraftTree.of(random.integers(0, VOCAB, 20).tolist(), [max(-1, i - 1 - i % 3) for i in range(20)])
    drafted_pages, pages, other_pages = random.permutation(runner.pages)[:24].astype(np.int32).reshape(3, 8)

    def logits(*rows: BatchRow) -> torch.Tensor:
        found: torch.Tensor = runner.step(lay_out([*rows]), 0).logits
        return found.clone()

    def chain(table: Int32Array, begin: int, tokens: Int32Array, tree: DraftTree = EMPTY_TREE) -> BatchRow:
        return BatchRow(table, begin, tokens, tree, logits_from=tokens.size - 1)

    other, size = chain(other_pages, 0, context[:30]), context.size
    logits(chain(drafted_pages, 0, context[:-1]), other)
    drafted = logits(chain(drafted_pages, size - 1, context[-1:], tree), other)
    path = [19]
    while tree.parents[path[0]] >= 0:
        path.insert(0, int(tree.parents[path[0]]))
    assert len(path) > 6
    logits(chain(pages, 0, context[:20]))
    logits(chain(pages, 20, context[20:-1]))
    for at, (row, token) in enumerate([(0, int(context[-1])), *((1 + node, int(tree.tokens[node])) for node in path)]):
        alone = logits(chain(pages, size - 1 + at, np.array([token], np.int32)))
        assert torch.equal(alone[0], drafted[row]), at


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.2, top_p=0.9, presence_penalty=0.3, seed=8)])
def test_answers_in_bfloat16_do_not_depend_on_drafts_and_batch(sampling: SamplingParams) -> None:
    model = exact_model("llama", torch.bfloat16)
    plain = run(model, None, sampling)
    oracle = OracleStrategy(
        {prompt: sequence.output for prompt, sequence in zip(PROMPTS, plain, strict=True)}, VOCAB, seed=3
    )
    drafted = run(model, oracle, sampling)
    assert [sequence.output for sequence in drafted] == [sequence.output for sequence in plain]
    assert sum(sequence.stats.accepted_tokens for sequence in drafted) > 0
    assert run(model, oracle, sampling, prompts=PROMPTS[:1])[0].output == plain[0].output


def test_a_tree_that_is_too_deep_is_an_error() -> None:
    deepest = tiling.LEVELS
    for levels in (deepest, deepest + 1):
        tree = DraftTree.of([*range(levels + 1)], [-1, -1, *range(1, levels)])
        batch = lay_out([BatchRow(np.arange(9, dtype=np.int32), 3, np.zeros(1, np.int32), tree, logits_from=0)])
        if levels == deepest:
            assert tiling.divide_exactly(batch, 16).token_parts[-1, 4] > 0
            continue
        with pytest.raises(ValueError, match="more levels than exact mode has room for"):
            tiling.divide_exactly(batch, 16)


@pytest.mark.slow
def test_answers_are_those_of_transformers() -> None:
    sequences = run(exact_model("llama", torch.float32), None)
    assert [sequence.output for sequence in sequences] == [written("llama", prompt) for prompt in PROMPTS]


def test_a_linear_layer_is_right_for_any_number_of_rows() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(70, 90, device=DEVICE)
    ours, hidden = exact_linear(layer.weight, layer.bias), torch.randn(2, 70, 70, device=DEVICE)
    whole = ours(hidden)
    assert (whole - layer(hidden)).abs().max() < 1e-5
    for rows in (1, 2, 17, 64, 65):
        assert torch.equal(ours(hidden[0, :rows]), whole[0, :rows])
    assert ours(hidden[:, :0]).shape == (2, 0, 90)


def test_the_trial_finds_what_depends_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers that divide their sum where there are few rows, as libraries do."""

    def divided(module: torch.nn.Module) -> int:
        count = make_exact(module)
        for part in module.modules():
            if type(part) is torch.nn.Linear:
                part.forward = _halves(part)  # type: ignore[method-assign]
        return count

    monkeypatch.setattr(factory, "make_exact", divided)
    with pytest.raises(UnsupportedRunnerError, match="in exact mode the bits of its logits still depend on the batch"):
        taken_over(small("llama").to(DEVICE), exact=True, runner="cuda")


def _halves(layer: torch.nn.Linear) -> Any:
    weight, half = layer.weight, layer.in_features // 2

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if hidden.shape[-2] > 4:
            return hidden @ weight.T
        return hidden[..., :half] @ weight.T[:half] + hidden[..., half:] @ weight.T[half:]

    return forward


def test_exact_mode_over_several_gpus_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="exact: True is not allowed; tensor_parallel is 2"):
        load_model(BUNDLED_MODEL, device="cpu", runner="cuda", tensor_parallel=2, exact=True)
