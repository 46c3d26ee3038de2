"""A screened vocabulary: the greatest logits are those of the head itself, however far off the copy in 8 bits is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import openvino as ov
import pytest
import torch
from openvino import opset13 as ops

import draftwood_strategies
from draftwood_model_runner.loading.model import LoadedModel
from draftwood_model_runner.request import SamplingParams, StopParams
from draftwood_model_runner.runners.openvino import output_head
from draftwood_model_runner.runners.openvino.factory import OpenVinoRunnerFactory, _compile
from draftwood_model_runner.runners.openvino.output_head import FasterWay, OutputHead
from draftwood_model_runner.runners.openvino.weights import GROUP, keep_bfloat16, quantize_weights
from draftwood_strategies.arrays import Float32Array
from tests.model_runner.families import generate, taken_over, tiny
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.runners.openvino.bfloat16 import needs_bfloat16
from tests.model_runner.sequences import GREEDY, batch_of, engine_of, make_sequence, run

VOCAB, SIZE = 5_000, 256
_TRIAL = OutputHead._trial
PROMPTS = [(3, 1, 4, 1, 5), (2, 7, 1), (8, 8, 8, 8)]


@pytest.fixture(autouse=True)
def _any_head_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FasterWay, "choose", lambda way: 1)
    monkeypatch.setattr(output_head, "_LEAST_ELEMENTS", 1)
    monkeypatch.setattr(OutputHead, "_trial", lambda head, rough: _TRIAL(head, rough) or True)


def near_ties(size: int, dtype: str) -> Float32Array:
    """A head of many groups of rows that differ less than 8 bits tell, and of a few equal ones."""
    random = np.random.default_rng(0)
    rows = np.repeat(random.standard_normal((VOCAB // 10, size)), 10, axis=0)
    rows += 3e-3 * random.standard_normal(rows.shape)
    rows[20:24] = 1.1 * rows[20]
    return torch.from_numpy(rows).to(getattr(torch, dtype)).float().numpy()


def made(weights: Float32Array, dtype: str) -> tuple[OutputHead, Callable[[Float32Array], Float32Array]]:
    """The head with these weights, and what it computes without screening, with 64 bits where `dtype` allows it."""
    hidden = ops.parameter([-1, weights.shape[1]], np.float32)
    model = ov.Model([ops.matmul(hidden, ops.constant(weights), False, True)], [hidden])
    if dtype == "bfloat16":
        keep_bfloat16(model)
    cut = output_head.cut_at_head(model, dtype)
    assert cut is not None
    head = OutputHead(cut.head, cut.weights, partial(_compile, dtype=dtype, threads=2, activation_group=128), 2)

    def exact(hidden: Float32Array) -> Float32Array:
        inputs = torch.from_numpy(hidden).to(getattr(torch, dtype)).double().numpy()
        logits: Float32Array = inputs @ weights.T.astype(np.float64)
        return logits

    return head, exact


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=needs_bfloat16)])
@pytest.mark.parametrize("size", [SIZE, 72])
def test_the_greatest_logits_are_exact(dtype: str, size: int) -> None:
    head, exact = made(near_ties(size, dtype), dtype)
    random, misled = np.random.default_rng(1), 0
    for rows in (1, 3, 40):
        hidden = random.standard_normal((rows, size), np.float32)
        hidden[:, 5] *= 30.0  # as an outlier channel
        wanted = exact(hidden)
        order = np.argsort(-wanted, axis=1, kind="stable")
        assert head._rough is not None
        misled += int((head._rough(hidden).argmax(1) != order[:, 0]).sum())
        for needed in (1, 7, 64):
            actual = head.logits(hidden, needed).copy()
            best = np.argsort(-actual, axis=1, kind="stable")[:, :needed]
            greatest = np.take_along_axis(wanted, order[:, :needed], 1)
            np.testing.assert_allclose(np.take_along_axis(actual, best, 1), greatest, rtol=1e-5)
            np.testing.assert_allclose(np.take_along_axis(wanted, best, 1), greatest, rtol=1e-5)
        np.testing.assert_allclose(head.logits(hidden, None), wanted, rtol=1e-3, atol=1e-3)
    assert misled > 5, "8 bits alone are not enough here"


class _RoundedProduct:
    """The head in 8 bits as a CPU computes it that rounds hidden states in groups of this size."""

    def __init__(self, weights: Float32Array, group: int) -> None:
        rounded = output_head._rounded(weights.view(np.int32), 1)
        self._matrix = (rounded.levels * rounded.scales).T.astype(np.float64)
        self._group = group

    def __call__(self, hidden: Float32Array) -> Float32Array:
        groups = hidden.reshape(hidden.shape[0], -1, self._group)
        levels = np.abs(groups).max(2, keepdims=True) / 127
        inputs = (np.rint(groups / levels) * levels).reshape(hidden.shape)
        logits: Float32Array = (inputs @ self._matrix).astype(np.float32)
        return logits

    def seconds(self, hidden: Float32Array) -> float:
        return 0.0


@pytest.mark.parametrize(("group", "fits"), [(GROUP, True), (1024, False)])
def test_a_cpu_that_rounds_by_the_row_screens_nothing(group: int, fits: bool, caplog: pytest.LogCaptureFixture) -> None:
    weights = near_ties(1024, "float32")
    head, _ = made(weights, "float32")
    assert "off by more than they should" not in caplog.text, "what OpenVINO computes here is within the bounds"
    rough: Any = _RoundedProduct(weights, group)
    assert _TRIAL(head, rough) is fits
    assert ("off by more than they should" in caplog.text) is not fits


def test_equal_rows_have_equal_logits() -> None:
    weights = near_ties(SIZE, "float32")
    head, _ = made(weights, "float32")
    logits = head.logits(np.ascontiguousarray(weights[20:21]), 1)
    assert len({*logits[0, 20:24].tolist()}) == 1
    assert logits[0].argmax() == 20


def test_the_faster_way_is_taken_and_the_other_one_tried_more_and_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    ways, taken = FasterWay(), list[int]()
    for step in range(2000):
        taken.append(ways.choose())
        ways.took(taken[-1], (3.0, 12.0 if step < 1000 else 1.0)[taken[-1]])
    assert {*taken[:2]} == {0, 1}
    assert 4 <= sum(taken[2:1000]) <= 8
    assert sum(taken[1000:]) > 0, "what became faster is found"
    assert sum(taken[-300:]) > 250


@pytest.mark.parametrize("way", [0, 1])
def test_a_vocabulary_of_many_candidates_is_exact_either_way(way: int, monkeypatch: pytest.MonkeyPatch) -> None:
    head, exact = made(np.repeat(near_ties(SIZE, "float32")[:1], VOCAB, axis=0), "float32")
    monkeypatch.setattr(FasterWay, "choose", lambda ways: way)
    hidden = np.ones((1, SIZE), np.float32)
    np.testing.assert_allclose(head.logits(hidden, 1), exact(hidden), rtol=1e-4)


def test_errors_beyond_their_bounds_end_screening(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(output_head, "_LEAST_ELEMENTS", 1)
    monkeypatch.setattr(OutputHead, "_bounds", lambda head, inputs, logits: np.zeros_like(logits))
    head, exact = made(near_ties(SIZE, "float32"), "float32")
    assert "more than they should" in caplog.text
    assert head._rough is None
    hidden = np.ones((2, SIZE), np.float32)
    np.testing.assert_allclose(head.logits(hidden, 1), exact(hidden), rtol=1e-4, atol=1e-4)


def test_a_model_is_cut_at_its_head() -> None:
    factory = taken_over(tiny("llama"), runner="openvino").factory
    assert isinstance(factory, OpenVinoRunnerFactory)
    model = factory.converted.model
    assert factory.runner(100)._head is not None
    assert output_head.cut_at_head(model, "bfloat16") is None
    quantize_weights(model, 8)
    assert output_head.cut_at_head(model, "float32") is None


@pytest.mark.parametrize(("family", "changes"), [("phi", {}), ("llama", {"vocab_size": 100})])
def test_other_heads_stay_in_the_model(family: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi adds a bias; a small one is not worth it."""
    monkeypatch.setattr(output_head, "_LEAST_ELEMENTS", 64 * 101)
    factory = taken_over(tiny(family, **changes), runner="openvino").factory
    assert isinstance(factory, OpenVinoRunnerFactory)
    assert factory.runner(100)._head is None


SAMPLINGS = [
    GREEDY,
    SamplingParams(temperature=0.8, top_k=5, seed=3),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.9, seed=3),
    SamplingParams(temperature=0.8, top_p=0.9, seed=3),
    SamplingParams(repetition_penalty=1.2),
    SamplingParams(logprobs=2),
]


def served(runner: str) -> LoadedModel:
    return taken_over(tiny("llama", vocab_size=VOCAB), runner=runner)


def greedy_answers() -> list[list[int]]:
    module = tiny("llama", vocab_size=VOCAB)
    return [generate(module, prompt, 30) for prompt in PROMPTS]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_answers_are_those_of_the_model(sampling: SamplingParams) -> None:
    """Of transformers itself where greedy, else of the runner that is compared with it."""
    screened, stop = served("openvino"), StopParams(30)
    sequences = batch_of(PROMPTS, stop, sampling)
    run(engine_of(served("torch"), 16), *sequences)
    expected = [sequence.output for sequence in sequences]
    assert sampling is not GREEDY or expected == greedy_answers()
    answers = dict(zip(PROMPTS, expected, strict=True))
    for strategy in (None, OracleStrategy(answers, VOCAB, seed=1), draftwood_strategies.create("hybrid")):
        actual = batch_of(PROMPTS, stop, sampling, strategy=strategy, max_draft_nodes=0 if strategy is None else 16)
        run(engine_of(screened, 16), *actual)
        assert [sequence.output for sequence in actual] == expected
        assert strategy is None or sum(sequence.stats.accepted_tokens for sequence in actual) > 0


def test_answers_do_not_depend_on_which_steps_are_screened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock decides in a service; here chance does."""
    random, ways = np.random.default_rng(5), list[int]()

    def choose(_: FasterWay) -> int:
        ways.append(int(random.integers(2)))
        return ways[-1]

    monkeypatch.setattr(FasterWay, "choose", choose)
    actual = batch_of(PROMPTS, StopParams(30), strategy=draftwood_strategies.create("hybrid"), max_draft_nodes=16)
    run(engine_of(served("openvino"), 16), *actual)
    assert [sequence.output for sequence in actual] == greedy_answers()
    assert {*ways} == {0, 1}


def test_requests_that_need_other_logits_share_steps() -> None:
    """They end at different times, so that later steps are screened and earlier ones are not."""
    answers = []
    for runner in ("torch", "openvino"):
        asked = [
            make_sequence(str(i), PROMPTS[0], StopParams(40 - 6 * i), sampling) for i, sampling in enumerate(SAMPLINGS)
        ]
        run(engine_of(served(runner), 0, max_running=len(asked)), *asked)
        answers.append([sequence.output for sequence in asked])
    assert answers[0] == answers[1]
