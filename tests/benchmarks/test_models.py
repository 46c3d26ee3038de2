"""The model of a benchmark, and models grown to a larger shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftwood_benchmarks.harness.models import Dtype, ModelOptions, choose_model, describe
from draftwood_benchmarks.widen import SHAPES, Shape, grown, parse_shape, shape_of, widen
from draftwood_model_runner.errors import InvalidInputError, InvalidValueError
from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_transformers_and_our_engine_compute_in_the_same_dtype(dtype: Dtype) -> None:
    """Whatever the dtype of our KV cache: otherwise the two could not be compared."""
    chosen = choose_model(ModelOptions(dtype=dtype, device="cpu"))
    ours = chosen.load()
    plain = chosen.load_plain(ours)
    assert ours.dtype == dtype
    assert {parameter.dtype for parameter in plain.parameters()} == {getattr(torch, dtype)}
    assert sum(parameter.numel() for parameter in plain.parameters()) == ours.parameters
    assert dtype in describe(chosen, ours)


def test_a_service_gets_the_options_of_the_model() -> None:
    flags = choose_model(ModelOptions(threads=1)).server_flags
    automatic = dict.fromkeys(("--device", "--dtype", "--runner", "--draft-head"), "auto")
    expected = {"--model": BUNDLED_MODEL, "--weights": "as-is", "--threads": "1", **automatic}
    assert dict(zip(flags[::2], flags[1::2], strict=True)) == expected


def test_only_a_llama_grows(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    chosen = choose_model(ModelOptions(model=str(tmp_path)))
    with pytest.raises(InvalidInputError, match=r"--model.*only a Llama can be grown"), grown(chosen, "110m", 4096):
        pass


def test_a_grown_model_is_loaded_from_a_folder_that_goes_with_it() -> None:
    chosen = choose_model(ModelOptions(device="cpu", runner="torch"))
    with grown(chosen, "320x7x5x768", 4096) as large:
        folder = Path(large.path)
        loaded = large.load()
        assert loaded.max_context == 4096
        assert loaded.parameters > chosen.load().parameters
        assert "shape 320x7x5x768" in describe(large, loaded)
    assert not folder.exists()


@pytest.fixture(scope="module")
def small() -> Any:
    return LlamaForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32).eval()


@pytest.mark.parametrize("shape", [Shape(320, 7, 5, 768), Shape(256, 6, 4, 704), Shape(512, 9, 6, 1024)], ids=str)
@torch.inference_mode()
def test_a_grown_model_computes_the_same_logits(small: Any, shape: Shape) -> None:
    assert difference(small, widen(small, shape, torch.float32)) < 2e-6


@torch.inference_mode()
def test_heads_are_rounded_down_to_whole_groups_and_the_width_with_them() -> None:
    """As of SmolLM2, whose 9 heads read 3 of keys: transformers saves only widths that are a multiple of the heads."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 4096}
    config = LlamaConfig(**sizes, num_attention_heads=6, num_key_value_heads=2, initializer_range=0.1)
    grouped = LlamaForCausalLM(config).eval()
    large = widen(grouped, Shape(256, 3, 16, 256), torch.float32)
    assert (large.config.num_attention_heads, large.config.num_key_value_heads) == (15, 5)
    assert large.config.hidden_size == 240
    assert difference(grouped, large) < 2e-6


def difference(small: Any, large: Any) -> float:
    ids = torch.randint(4, 4096, (2, 48), generator=torch.Generator().manual_seed(1))
    expected, logits = small(ids).logits, large(ids).logits
    return float((logits - expected).abs().max() / expected.abs().max())


def test_a_grown_model_costs_what_its_shape_costs_and_is_the_same_every_time(small: Any) -> None:
    """No matrix of a forward pass is smaller than in the shape, and those that may be dense are."""
    state = torch.get_rng_state()
    large, again = (widen(small, Shape(320, 7, 5, 768), torch.bfloat16) for _ in range(2))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(large.parameters(), again.parameters(), strict=True))
    assert all(parameter.dtype == torch.bfloat16 for parameter in large.parameters())
    for layer in large.model.layers:
        assert layer.self_attn.q_proj.weight.shape == (5 * 64, 320)
        assert layer.self_attn.o_proj.weight.shape == (320, 5 * 64)
        assert layer.mlp.gate_proj.weight.shape == layer.mlp.up_proj.weight.shape == (768, 320)
        assert (layer.self_attn.q_proj.weight[4 * 64 :] != 0).all()
        assert (layer.mlp.up_proj.weight[704:] != 0).all()


def test_shapes_are_read_and_written(small: Any) -> None:
    assert parse_shape("native") is None
    assert parse_shape("320x7x5x768") == Shape(320, 7, 5, 768)
    assert str(Shape(320, 7, 5, 768)) == "320x7x5x768"
    for shape in filter(None, SHAPES.values()):
        sizes = ("hidden", "layers", "heads", "intermediate")
        assert all(getattr(shape, size) >= getattr(shape_of(small.config), size) for size in sizes)
    for text in ("", "14b", "320x7x5", "320x7x5x-8", "320x7x5x7.5", "ax7x5x768"):
        with pytest.raises(InvalidValueError, match="110m"):
            parse_shape(text)


def test_nothing_shrinks(small: Any) -> None:
    with pytest.raises(InvalidValueError, match="grows from 256x6x4x704 and cannot lose layers"):
        widen(small, Shape(256, 5, 4, 704), torch.float32)
