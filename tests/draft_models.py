"""Models that draft for the bundled one: it with fewer layers, and a head that was not trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL

_WIDTH, _DRAFT_VOCAB = 256, 512


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
