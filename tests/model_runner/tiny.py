"""The shape of a tiny model, for any config class of transformers that has the usual names."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def build(config: Any) -> Any:
    """A random float32 model, the same each time."""
    torch.manual_seed(0)
    return tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
