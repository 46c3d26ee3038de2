"""The model of a benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from draftwood_benchmarks.harness.models import Dtype, ModelOptions, chosen_model, describe
from draftwood_benchmarks.harness.widen import SHAPES, Shape, parse_shape, widen
from draftwood_model_runner.errors import InvalidInputError, InvalidValueError
from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL


@pytest.mark.parametrize(
    ("shape", "dtype"), [("native", "bfloat16"), ("native", "float32"), ("320x7x5x768", "bfloat16")]
)
def test_transformers_and_our_engine_compute_in_the_same_dtype(shape: str, dtype: Dtype) -> None:
    """Whatever the dtype of our KV cache: otherwise the two could not be compared."""
    with chosen_model(ModelOptions(shape=shape, dtype=dtype, device="cpu")) as chosen:
        ours = chosen.load()
        plain = chosen.load_plain(ours)
    assert ours.dtype == dtype
    assert {parameter.dtype for parameter in plain.parameters()} == {getattr(torch, dtype)}
    assert sum(parameter.numel() for parameter in plain.parameters()) == ours.parameters
    assert dtype in describe(chosen, ours)


def test_the_vocabulary_and_the_positions_grow_without_a_shape() -> None:
    options = ModelOptions(vocabulary=6000, device="cpu", runner="torch")
    with chosen_model(options, positions=4096) as chosen:
        loaded = chosen.load()
    assert (loaded.vocab_size, loaded.max_context) == (6000, 4096)
    assert "6,000 tokens" in describe(chosen, loaded)


@pytest.mark.parametrize(("named", "options"), [("--shape", {"shape": "110m"}), ("--vocabulary", {"vocabulary": 9000})])
def test_only_a_llama_grows(tmp_path: Path, named: str, options: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    wanted = ModelOptions(model=str(tmp_path), **options)
    with pytest.raises(InvalidInputError, match=f"{named}.*only a Llama can be grown"), chosen_model(wanted):
        pass


def test_another_llama_than_the_bundled_one_grows() -> None:
    options = ModelOptions(model=BUNDLED_MODEL, shape="320x7x5x768", device="cpu", runner="torch")
    with chosen_model(options) as chosen:
        assert chosen.load().parameters > chosen.load_small().parameters
        assert chosen.small == BUNDLED_MODEL
    own = ModelOptions(model=BUNDLED_MODEL, device="cpu")
    with chosen_model(own, positions=4096) as chosen:
        assert chosen.path == BUNDLED_MODEL, "positions alone are of the bundled model"


def test_a_grown_model_is_gone_when_it_is_no_longer_needed() -> None:
    with chosen_model(ModelOptions(shape="320x7x5x768", threads=1)) as chosen:
        folder = Path(chosen.path)
        assert {"model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
        flags = dict(zip(chosen.server_flags[::2], chosen.server_flags[1::2], strict=True))
        automatic = dict.fromkeys(("--device", "--dtype", "--runner", "--draft-head"), "auto")
        assert flags == {"--model": str(folder), "--weights": "as-is", "--threads": "1", **automatic}
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


@torch.inference_mode()
def test_a_hybrid_model_computes_the_same_logits(small: Any) -> None:
    """Most of its layers keep a state, and its attention has norms and gates that Llama's has not."""
    large = widen(small, Shape(320, 25, 6, 768, hybrid=True), torch.float32)
    kinds = [layer.block_type for layer in large.model.layers]
    assert kinds.count("full_attention") == 6
    assert kinds.count("linear_attention") == 19
    assert difference(small, large) < 2e-4


def difference(small: Any, large: Any) -> float:
    ids = torch.randint(4, 4096, (2, 48), generator=torch.Generator().manual_seed(1))
    expected, logits = small(ids).logits, large(ids).logits
    return float((logits - expected).abs().max() / expected.abs().max())


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_added_tokens_are_never_among_the_most_probable(small: Any, dtype: torch.dtype) -> None:
    """Nor among the 20 of which default sampling chooses: text, drafts and drawn tokens stay those of the model."""
    large = widen(small, Shape(320, 7, 5, 768), dtype, vocabulary=20_000)
    assert large.get_input_embeddings().weight.shape == large.get_output_embeddings().weight.shape == (20_000, 320)
    assert (large.lm_head.weight[4096:].abs().sum(1) > 0).all()
    prompts = (f"[{word}] where is my order" for word in ("parcel", "invoice", "account"))
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        written = small.generate(ids, max_new_tokens=60, do_sample=False)
        logits, expected = large(written).logits.float(), small(written).logits
        if dtype == torch.float32:
            torch.testing.assert_close(logits[..., :4096], expected, rtol=1e-4, atol=1e-4)
        assert int(logits.topk(20).indices.max()) < 4096


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


def test_shapes_are_read_and_written() -> None:
    assert parse_shape("native") is None
    assert parse_shape("110m") is SHAPES["110m"]
    assert parse_shape("320x7x5x768") == Shape(320, 7, 5, 768)
    assert str(Shape(320, 7, 5, 768)) == "320x7x5x768"
    for text in ("", "14b", "320x7x5", "320x7x5x-8", "320x7x5x7.5", "ax7x5x768"):
        with pytest.raises(InvalidValueError, match="110m"):
            parse_shape(text)


@pytest.mark.parametrize(
    ("sizes", "vocabulary", "message"),
    [
        ((128, 6, 4, 704), None, "cannot lose hidden"),
        ((256, 5, 4, 704), None, "cannot lose layers"),
        ((256, 6, 3, 704), None, "cannot lose heads"),
        ((256, 6, 4, 700), None, "cannot lose intermediate"),
        ((320, 7, 5, 768), 4095, "grows from 4096 tokens"),
    ],
)
def test_nothing_shrinks(small: Any, sizes: tuple[int, int, int, int], vocabulary: int | None, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        widen(small, Shape(*sizes), torch.float32, vocabulary=vocabulary)
