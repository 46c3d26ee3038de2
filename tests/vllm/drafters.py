"""Small drafters for the bundled model: itself without its last layers, and an EAGLE-3 head of random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL

_LAYER = "model.layers."
_MODEL = Path(BUNDLED_MODEL)


def shortened(folder: Path, layers: int) -> Path:
    """A model of its own that has the bundled model's first layers, and often writes the same token."""
    weights = {name: value for file in _MODEL.glob("*.safetensors") for name, value in load_file(file).items()}
    kept = {
        name: value
        for name, value in weights.items()
        if not name.startswith(_LAYER) or int(name.removeprefix(_LAYER).partition(".")[0]) < layers
    }
    return _written(folder, _config() | {"num_hidden_layers": layers}, kept)


def eagle3(folder: Path) -> Path:
    """A head that knows nothing."""
    config = _config() | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": _config()["vocab_size"],
        "tie_word_embeddings": False,
    }
    width, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    shapes = {
        "embed_tokens.weight": (vocabulary, width),
        "fc.weight": (width, 3 * width),
        "norm.weight": (width,),
        "lm_head.weight": (vocabulary, width),
        "midlayer.hidden_norm.weight": (width,),
        "midlayer.input_layernorm.weight": (width,),
        "midlayer.post_attention_layernorm.weight": (width,),
        **{f"midlayer.self_attn.{name}_proj.weight": (heads, 2 * width) for name in "qkv"},
        "midlayer.self_attn.o_proj.weight": (width, heads),
        "midlayer.mlp.gate_proj.weight": (inner, width),
        "midlayer.mlp.up_proj.weight": (inner, width),
        "midlayer.mlp.down_proj.weight": (width, inner),
    }
    random = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=random) * 0.05 for name, shape in shapes.items()}
    return _written(folder, config, weights)


def _config() -> dict[str, Any]:
    config: dict[str, Any] = json.loads((_MODEL / "config.json").read_text())
    return config


def _written(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors")
    for file in _MODEL.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder
