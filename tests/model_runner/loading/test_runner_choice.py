"""Which runner computes a model, why, and that nothing else about the model depends on it."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch

from draftwood_model_runner.errors import InvalidValueError, UnsupportedRunnerError
from draftwood_model_runner.loading import loaded as runner_choice
from draftwood_model_runner.loading.model import BUNDLED_MODEL, LoadedModel, load_model
from tests.model_runner.families import taken_over, tiny
from tests.model_runner.runners.openvino.bfloat16 import needs_bfloat16


def adopted(family: str, dtype: torch.dtype = torch.float32, **options: Any) -> LoadedModel:
    return taken_over(tiny(family).to(dtype), **options)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_bfloat16)])
def test_openvino_is_the_choice_on_a_cpu(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = adopted("llama", dtype, runner="auto")
    assert (model.runner_name, model.runner_reason, model.exact) == ("openvino", "the model is on a CPU", False)
    assert "runner openvino: the model is on a CPU" in caplog.text


def test_what_openvino_cannot_compute_falls_back_to_torch(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = adopted("gemma2", runner="auto")
    assert model.runner_name == "torch"
    assert "soft-capping" in model.runner_reason
    assert model.runner_reason in caplog.text
    with pytest.raises(UnsupportedRunnerError, match="soft-capping"):
        adopted("gemma2", runner="openvino")


def test_exact_mode_is_torchs() -> None:
    model = adopted("llama", runner="auto", exact=True)
    assert (model.runner_name, model.exact) == ("torch", True)
    assert "exact" in model.runner_reason
    with pytest.raises(InvalidValueError, match="the openvino runner has no exact mode; use runner torch") as caught:
        load_model(BUNDLED_MODEL, runner="openvino", exact=True)
    assert caught.value.field == "exact"


def test_quantized_weights_need_openvino() -> None:
    model = adopted("llama", runner="auto", weights="int4")
    assert (model.runner_name, model.runner_reason) == ("openvino", "weights are int4")
    assert (model.dtype, model.weights) == ("float32", "int4")
    assert model.fingerprint == adopted("llama", runner="torch").fingerprint
    assert adopted("llama", torch.bfloat16, runner="torch").weights == "bfloat16"


@pytest.mark.parametrize(
    ("options", "allowed"),
    [({"runner": "torch"}, "it must be as-is with runner torch"), ({"exact": True}, "it must be as-is in exact mode")],
)
def test_quantized_weights_are_refused_before_the_model_loads(options: dict[str, Any], allowed: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        load_model("/no/such/folder", weights="int8", **options)
    assert (caught.value.field, caught.value.value) == ("weights", "int8")
    assert allowed in caught.value.allowed


@pytest.mark.parametrize("runner", ["auto", "openvino"])
def test_quantized_weights_of_a_model_that_openvino_cannot_compute(runner: str) -> None:
    with pytest.raises(InvalidValueError, match=r"it must be as-is for this model; OpenVINO: .*soft-capping") as caught:
        adopted("gemma2", runner=runner, weights="int8")
    assert (caught.value.field, caught.value.value) == ("weights", "int8")


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("weights", "int2", "as-is, int8, int4"),
        ("runner", "onnx", "auto, cuda, openvino, torch"),
        ("device", "toaster", "cuda:N"),
        ("dtype", "int3", "float32"),
        ("max_context", 10**9, "context"),
    ],
)
def test_a_bad_option_is_named_with_what_is_allowed(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(InvalidValueError, match=allowed) as caught:
        load_model(BUNDLED_MODEL, **{field: value})
    assert (caught.value.field, caught.value.value) == (field, value)


def test_where_the_package_is_missing_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_choice, "find_spec", lambda name: None)
    assert adopted("llama", runner="auto").runner_reason == "OpenVINO: the package openvino is not installed"
    with pytest.raises(UnsupportedRunnerError, match="not installed"):
        adopted("llama", runner="openvino")


def test_all_else_is_the_same_with_every_runner() -> None:
    by_torch, by_openvino = adopted("llama", runner="torch"), adopted("llama", runner="openvino")
    chosen = {"factory", "runner_reason", "tokenizer", "grammars"}
    for name in {field.name for field in dataclasses.fields(LoadedModel)} - chosen:
        assert getattr(by_torch, name) == getattr(by_openvino, name), name
