"""Converted models compute what their modules do, in fewer products; and importing OpenVINO sends nothing."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import torch
import transformers as tf

from draftwood_model_runner.errors import UnsupportedRunnerError
from draftwood_model_runner.runners.base import NO_LIMITS, DraftLimits
from draftwood_model_runner.runners.openvino import pages
from draftwood_model_runner.runners.openvino.conversion import convert
from draftwood_model_runner.runners.openvino.factory import take_over
from draftwood_model_runner.runners.openvino.weights import keep_bfloat16
from tests.model_runner.families import tiny
from tests.model_runner.runners.openvino.bfloat16 import needs_bfloat16
from tests.model_runner.small_models import TINY, build

_EXPERTS: dict[str, Any] = {"num_key_value_heads": 2, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda: build(tf.MambaConfig(**{**TINY, "state_size": 8})), "layers of type linear_attention"),
        (lambda: build(tf.BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=128)), "code of its own"),
        (lambda: build(tf.MistralConfig(**TINY, num_key_value_heads=8)), "4 heads cannot share 8 heads"),
        (lambda: tiny("gemma2"), "soft-capping"),
        (lambda: build(tf.GptOssConfig(**TINY, **_EXPERTS, head_dim=16, num_local_experts=4)), "sinks"),
        (
            lambda: build(tf.JetMoeConfig(**TINY, **_EXPERTS, num_local_experts=4, kv_channels=16)),
            "depends on values of tensors",
        ),
        (lambda: tiny("llama").half(), "float16 is not supported"),
    ],
)
def test_refused_with_the_reason(made: Any, reason: str) -> None:
    with pytest.raises(UnsupportedRunnerError, match=f"OpenVINO: .*({reason})"):
        take_over(made(), max_context=128)


def test_behind_a_window_drafts_are_chains_and_before_it_trees_end_in_it() -> None:
    module = build(tf.MistralConfig(**TINY, num_key_value_heads=2, sliding_window=60))
    limits = take_over(module, max_context=128).runner(128).draft_limits
    assert limits(30) == DraftLimits(max_nodes=29)  # the last of them is in row 59
    assert limits(51) == DraftLimits(max_nodes=8)
    assert limits(52) == limits(100) == DraftLimits(branches=False)
    assert take_over(module, max_context=60).runner(128).draft_limits(52) == NO_LIMITS


def test_a_window_that_the_attention_is_not_told_of_is_refused() -> None:
    module = tiny("qwen2-sliding")
    module.model.layers[2].self_attn.sliding_window = None
    with pytest.raises(UnsupportedRunnerError, match="Qwen2ForCausalLM hides the sliding window of layer 2"):
        take_over(module, max_context=128)


def test_mixtures_of_experts_are_computed() -> None:
    config = tf.Qwen3MoeConfig(**TINY, **_EXPERTS, num_experts=4, moe_intermediate_size=32)
    assert take_over(build(config), max_context=128).name == "openvino"


def test_a_graph_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the mask of a tree, nodes see their siblings."""
    monkeypatch.setattr(pages, "tree_mask", lambda parents, offsets: (np.zeros(0, np.uint8), np.zeros_like(offsets)))
    with pytest.raises(UnsupportedRunnerError, match=r"differ from the model's own by .*e.*\(at most 1e-03"):
        take_over(tiny("llama"), max_context=128)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_bfloat16)])
@torch.inference_mode()
def test_the_module_is_left_as_it_was(dtype: torch.dtype) -> None:
    module, ids = tiny("qwen2").to(dtype), torch.arange(20)[None]
    state = {name: tensor.clone() for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    logits, config = module(ids).logits, dict(vars(module.config))
    take_over(module, max_context=128)
    assert dict(vars(module.config)) == config
    assert not any(part._forward_pre_hooks for part in module.modules())
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        assert tensor.dtype == state[name].dtype
        assert torch.equal(tensor, state[name])
    assert torch.equal(module(ids).logits, logits)


@needs_bfloat16
def test_bfloat16_is_computed() -> None:
    module = tiny("llama").to(torch.bfloat16)
    assert take_over(module, max_context=128).kv_bytes_per_token == 3 * 2 * 2 * 16 * torch.bfloat16.itemsize


def test_models_that_come_and_go_leave_the_signal_stack_alone() -> None:
    """OpenVINO exchanges the main thread's signal stack; a freed one would end the process at the next signal."""
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    try:
        factories = [take_over(tiny(family), max_context=128) for family in ("llama", "qwen2")]
        while factories:
            factories.pop(0)
            gc.collect()
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert received == [signal.SIGUSR1]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_layer_has_four_products(family: str) -> None:
    """With biases (Qwen2) and without; nothing is transposed on the way to attention."""
    module = tiny(family)
    model = convert(module, max_context=128).model
    products = [node for node in model.get_ops() if node.get_type_name() == "MatMul"]
    weights = [node for node in products if node.input_value(1).get_node().get_type_name() == "Constant"]
    assert len(weights) == 4 * module.config.num_hidden_layers + 1
    for node in model.get_ops():
        if node.get_type_name() == "PagedAttentionExtension":
            flat = [node.input_value(i).get_node() for i in range(3)]
            assert [node.get_type_name() for node in flat] == ["Reshape"] * 3
            assert all(node.input_value(0).get_node().get_type_name() != "Transpose" for node in flat[:2])


def test_the_weights_of_a_bfloat16_model_are_all_found() -> None:
    model = convert(tiny("llama").to(torch.bfloat16), max_context=128).model
    keep_bfloat16(model)
    for node in model.get_ops():
        if node.get_type_name() in ("MatMul", "Gather") and len(node.inputs()) > 1:
            port = 1 if node.get_type_name() == "MatMul" else 0
            weight = node.input_value(port).get_node()
            assert weight.get_type_name() != "Constant" or weight.get_element_type() != ov.Type.f32


@pytest.mark.system
def test_importing_the_runner_sends_and_keeps_nothing(tmp_path: Path) -> None:
    code = "import sys, draftwood_model_runner.runners.openvino.factory; print(sys.modules['openvino_telemetry'])"
    environment = {**os.environ, "HOME": str(tmp_path)}
    actual = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert actual.stdout == "None\n"
    assert not (tmp_path / "intel").exists()
