"""Quantized weights: how matrices are rounded, which models are refused, and that drafts change no token."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import openvino as ov
import pytest
import transformers as tf
from hypothesis import given
from hypothesis import strategies as st
from openvino import opset13 as ops

from draftwood_model_runner.engine import Engine, EngineConfig
from draftwood_model_runner.errors import UnsupportedRunnerError
from draftwood_model_runner.loading.model import BUNDLED_MODEL, LoadedModel, load_model
from draftwood_model_runner.output import Answer, Finish, FinishReason
from draftwood_model_runner.request import SamplingParams, StopParams
from draftwood_model_runner.runners.openvino import factory as probe
from draftwood_model_runner.runners.openvino import pages, weights
from draftwood_model_runner.runners.openvino.conversion import convert
from draftwood_model_runner.runners.openvino.factory import core, take_over
from draftwood_model_runner.sequence import Sequence
from tests.model_runner.families import HAS_AMX, VOCAB, tiny
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.runners.openvino.bfloat16 import needs_bfloat16
from tests.model_runner.sequences import batch_of, engine_of, run
from tests.model_runner.small_models import TINY, build

QUESTIONS = ("where is my order", "i want a refund!!", "how do I change my adress")
NEW_TOKENS = 100


class Kind(NamedTuple):
    dtype: str
    weights: str


KINDS = [
    pytest.param(Kind(dtype, weights), id=f"{dtype}-{weights}", marks=marks)
    for dtype, marks in (("float32", ()), ("bfloat16", needs_bfloat16))
    for weights in ("int8", "int4")
]


@functools.cache
def bundled(kind: Kind) -> LoadedModel:
    return load_model(BUNDLED_MODEL, dtype=kind.dtype, max_context=128, weights=kind.weights)


def questions(model: LoadedModel) -> list[tuple[int, ...]]:
    return [tuple(model.tokenizer.encode_chat([{"role": "user", "content": text}]).tolist()) for text in QUESTIONS]


def check_same(sequences: list[Sequence], kind: Kind, expected: list[list[int]]) -> None:
    """The same tokens; with AMX the same but for ties, as products of up to four tokens take another kernel there."""
    if kind.dtype == "float32" or not HAS_AMX:
        assert [sequence.output for sequence in sequences] == expected
        return
    engine = Engine(bundled(kind), EngineConfig())
    for sequence in sequences:
        redecoding = engine.redecode(Answer(sequence.request, tuple(sequence.output), Finish(FinishReason.LENGTH)))
        while not redecoding.done:
            redecoding.step()
        assert redecoding.difference is None or redecoding.difference.margin < 2.0**-6  # as audits judge


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=0.8, seed=3)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_trees_of_any_shape_and_preemption_change_no_token(kind: Kind, sampling: SamplingParams) -> None:
    """Plain decoding answers one question after the other."""
    model, stop = bundled(kind), StopParams(NEW_TOKENS, ignore_eos=True)
    plain, alone = batch_of(questions(model), stop, sampling), engine_of(model, 24, prefix_cache=False)
    for sequence in plain:
        run(alone, sequence)
    expected = [list(sequence.output) for sequence in plain]
    oracle = OracleStrategy(dict(zip(questions(model), expected, strict=True)), VOCAB, 1)
    sequences = batch_of(questions(model), stop, sampling, strategy=oracle, max_draft_nodes=24)
    run(engine_of(model, 24, prefix_cache=False, kv_cache_tokens=192), *sequences)
    check_same(sequences, kind, expected)
    assert sum(sequence.stats.preemptions for sequence in sequences) > 0
    assert sum(sequence.stats.accepted_tokens for sequence in sequences) > 0


WEIGHTS = st.floats(-100, 100, width=32).map(lambda weight: weight if abs(weight) > 1e-30 else 0.0)
"""A step of smaller ones would be a subnormal number, and rounded itself."""


@given(
    st.integers(1, 6).flatmap(
        lambda columns: st.lists(st.lists(WEIGHTS, min_size=columns, max_size=columns), min_size=1, max_size=6)
    )
)
def test_a_matrix_is_rounded_by_half_a_step_at_most(rows: list[list[float]]) -> None:
    matrix = np.array(rows, np.float32)
    for axis in (0, 1):
        levels, scales, zero_points = weights.quantize(matrix, axis)
        assert [array.dtype.name for array in (levels, zero_points, scales)] == ["uint8", "uint8", "float32"]
        assert scales.shape == zero_points.shape == matrix.max(axis, keepdims=True).shape
        rounded = (levels.astype(np.float32) - zero_points) * scales
        # An end of the range may fall beyond the last level by what the zero point was rounded.
        assert (np.abs(rounded - matrix) <= scales * 1.001).all()
        assert (rounded[matrix == 0.0] == 0.0).all()
        if (matrix.min(axis) <= 0.0).all():
            assert np.abs(rounded - matrix).mean() <= scales.mean() * 0.501


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", ["llama", "gpt-neox"])
def test_all_matrices_are_quantized(family: str, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order of their sides. 4 bits are for products other than the head whose inputs are whole groups."""
    monkeypatch.setattr(weights, "GROUP", 64)
    model = convert(tiny(family, intermediate_size=96), 128)[0]
    before = _matrices(model)
    weights.quantize_weights(model, bits)
    assert _matrices(model) == []
    stored: dict[str, list[list[int]]] = {"u4": [], "u8": []}
    for node in model.get_ops():
        kind = node.get_element_type().get_type_name() if node.get_type_name() == "Constant" else ""
        if kind in stored and node.shape[-1] > 1:
            stored[kind].append([*node.shape])
    assert len(stored["u4"]) + len(stored["u8"]) == len(before) > 3 * 4
    assert {shape[1] for shape in stored["u8"]} == {64, 96}
    assert {shape[-1] for shape in stored["u4"]} == ({64} if bits == 4 else set())


def test_groups_of_inputs_are_rounded_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of 4-bit weights is that of the rounded weights, also where the weights have inputs first."""
    random = np.random.default_rng(0)
    matrix = random.normal(size=(128, 6)).astype(np.float32)
    matrix[64:] *= 50.0  # another group: the first one is rounded to its own scale
    given = ops.parameter([-1, 128], ov.Type.f32)
    first = ops.matmul(given, ops.constant(matrix), False, False)
    head = ops.matmul(first, ops.constant(random.normal(size=(5, 6)).astype(np.float32)), False, True)
    model = ov.Model([first.output(0), head.output(0)], [given])
    monkeypatch.setattr(weights, "GROUP", 64)
    weights.quantize_weights(model, 4)
    inputs = random.normal(size=(3, 128)).astype(np.float32)
    options = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    product = core().compile_model(model, "CPU", options)(inputs)[0]
    levels, scales, zero_points = weights.quantize(matrix.T.reshape(6, 2, 64), 2, 4)
    assert levels.max() == 15
    rounded = ((levels.astype(np.float32) - zero_points) * scales).reshape(6, 128).T
    assert np.abs(rounded[:64] - matrix[:64]).max() < 0.5
    assert np.allclose(product, inputs @ rounded, rtol=1e-4, atol=1e-3)


def _matrices(model: ov.Model) -> list[str]:
    return [
        node.get_friendly_name()
        for node in model.get_ordered_ops()
        if node.get_type_name() == "Constant"
        and node.get_element_type() == ov.Type.f32
        and len(node.shape) == 2
        and min(node.shape) > 1
    ]


def test_experts_are_refused() -> None:
    module = build(tf.MixtralConfig(**TINY, num_key_value_heads=2, num_experts_per_tok=2, num_local_experts=8))
    with pytest.raises(UnsupportedRunnerError, match=r"only \d+% of the weights are in linear layers"):
        take_over(module, max_context=128, weights="int8")


@pytest.mark.parametrize("kept", ["int8", "int4"])
def test_a_broken_quantization_is_refused(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row with the zero point of another, as a wrong axis or order would give."""

    def broken(matrix: Any, axis: int, bits: int = 8) -> tuple[Any, Any, Any]:
        levels, scales, zero_points = quantize(matrix, axis, bits)
        return levels, scales, np.roll(zero_points, 1)

    quantize = weights.quantize
    monkeypatch.setattr(weights, "quantize", broken)
    with pytest.raises(UnsupportedRunnerError, match=f"logits with {kept} weights differ from the model's own"):
        take_over(tiny("llama"), max_context=128, weights=kept)


def test_trees_are_compared_with_the_quantized_model_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mask, nodes see their siblings; the bound of quantization is too wide to notice."""
    monkeypatch.setitem(probe.QUANTIZED_TOLERANCE, "int8", 10.0)
    monkeypatch.setattr(pages, "tree_mask", lambda parents, offsets: (np.zeros(0, np.uint8), np.zeros_like(offsets)))
    with pytest.raises(UnsupportedRunnerError, match="logits over a draft tree differ"):
        take_over(tiny("llama"), max_context=128, weights="int8")
