"""Models that draft for the bundled one: it with fewer layers, and a head that was not trained. And a model whose text
follows from its latest token, with a head that knows how."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL

_WIDTH, _DRAFT_VOCAB = 256, 512
PERMUTED = 64
"""Tokens of a model that permutes."""
_SHAPE: dict[str, Any] = {
    "hidden_size": PERMUTED,
    "intermediate_size": PERMUTED,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": PERMUTED,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def write_fewer_layers(folder: Path, layers: int, **config: Any) -> str:
    """The bundled model without its last layers; returns the folder.

    Args:
        config: other values of config.json.
    """
    shutil.copytree(BUNDLED_MODEL, folder)
    path, weights = folder / "config.json", folder / "model.safetensors"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": layers} | config))
    kept = {name: tensor for name, tensor in load_file(weights).items() if _layer(name) < layers}
    save_file(kept, weights, {"format": "pt"})
    return str(folder)


def _layer(name: str) -> int:
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else -1


def write_untrained_head(folder: Path, width: int = _WIDTH, **config: Any) -> str:
    """A head of random weights in the form of EAGLE-3, for the bundled model; returns the folder.

    Args:
        width: of its target.
        config: other values of config.json.
    """
    folder.mkdir()
    drawn = torch.Generator().manual_seed(0)
    values: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    values |= {"head_dim": width // 4, "num_hidden_layers": 1, "vocab_size": 4096, "draft_vocab_size": _DRAFT_VOCAB}
    values |= {"model_type": "llama", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, **config}
    (folder / "config.json").write_text(json.dumps(values))

    def of(*shape: int) -> torch.Tensor:
        return 0.02 * torch.randn(*shape, generator=drawn)

    tensors = {
        "fc.weight": of(width, 3 * width),
        "lm_head.weight": of(_DRAFT_VOCAB, width),
        "d2t": torch.zeros(_DRAFT_VOCAB, dtype=torch.int64),
        "midlayer.self_attn.o_proj.weight": of(width, width),
        "midlayer.mlp.down_proj.weight": of(width, 2 * width),
        **{f"midlayer.self_attn.{name}_proj.weight": of(width, 2 * width) for name in "qkv"},
        **{f"midlayer.mlp.{name}_proj.weight": of(2 * width, width) for name in ("gate", "up")},
        **{f"midlayer.{name}.weight": torch.ones(width) for name in ("input_layernorm", "hidden_norm")},
        **{name: torch.ones(width) for name in ("midlayer.post_attention_layernorm.weight", "norm.weight")},
    }
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def write_model(folder: Path, module: Any) -> str:
    """A model, with the bundled one's tokenizer, which has more tokens; returns the folder."""
    module.generation_config.eos_token_id = None
    module.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (file := Path(BUNDLED_MODEL, name)).exists():
            shutil.copy(file, folder / name)
    return str(folder)


def _next_token() -> torch.Tensor:
    """float32[PERMUTED, PERMUTED], from a token to the next one: a permutation of one cycle."""
    order = torch.randperm(PERMUTED, generator=torch.Generator().manual_seed(0))
    matrix = torch.zeros(PERMUTED, PERMUTED)
    matrix[order.roll(-1), order] = 1.0
    return matrix


def permuting_model() -> Any:
    """A model of two layers that add nothing: the hidden state is the token, and its output head permutes."""
    config = LlamaConfig(**_SHAPE, num_hidden_layers=2, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    torch.manual_seed(0)
    module: Any = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        module.model.embed_tokens.weight.copy_(torch.eye(PERMUTED))
        module.lm_head.weight.copy_(_next_token())
        for layer in module.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return module


def write_knowing_head(folder: Path) -> str:
    """The head of `permuting_model`, all of whose drafts are right; returns the folder.

    It reads the token from the first layer and from what the output head reads. Its MLP permutes the hidden state, so
    that it stays one token ahead at each level of a draft.
    """
    folder.mkdir()
    none, each, following = torch.zeros(PERMUTED, PERMUTED), torch.eye(PERMUTED), _next_token()
    normed = PERMUTED**0.5  # a hidden state with a single 1, behind a norm
    moved = float(nn.functional.silu(torch.tensor(normed))) * normed
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "fc.weight": torch.cat([each / 2, none, each / 2 / normed], dim=1),
        "lm_head.weight": 3 * following,
        "midlayer.self_attn.o_proj.weight": none.clone(),
        "midlayer.mlp.gate_proj.weight": each,
        "midlayer.mlp.up_proj.weight": each.clone(),
        "midlayer.mlp.down_proj.weight": (following - each) / moved,
        **{
            f"midlayer.self_attn.{name}_proj.weight": torch.randn(rows, 2 * PERMUTED, generator=generator)
            for name, rows in (("q", PERMUTED), ("k", PERMUTED // 2), ("v", PERMUTED // 2))
        },
        **{f"midlayer.{name}.weight": torch.ones(PERMUTED) for name in ("input_layernorm", "hidden_norm")},
        **{name: torch.ones(PERMUTED) for name in ("midlayer.post_attention_layernorm.weight", "norm.weight")},
    }
    values = {**_SHAPE, "model_type": "llama", "num_hidden_layers": 1, "draft_vocab_size": PERMUTED}
    values["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)
