"""Real GGUF files: the bundled model, written with the package gguf as llama.cpp's converter writes a Llama."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import load_file

from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_NORMAL, _CONTROL = 1, 3
"""Types of tokens."""


def write_gguf(
    file: Path,
    *,
    quantized: GGMLQuantizationType = GGMLQuantizationType.F32,
    head: bool = False,
    architecture: str = "llama",
    tokenizer: bool = True,
    parts: int = 1,
) -> Path:
    """Writes the bundled model.

    Args:
        quantized: how its matrices are stored; norms are float32.
        head: write the tied head a second time.
        architecture: that the file names.
        tokenizer: whether the file has one.
        parts: that the file claims to be one of.
    """
    config = json.loads(Path(BUNDLED_MODEL, "config.json").read_text())
    writer = GGUFWriter(file, architecture)
    writer.add_name("bundled")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if parts > 1:
        writer.add_uint16("split.count", parts)
    if tokenizer:
        _add_tokenizer(writer, config)
    for name, weight in _tensors(config, head).items():
        kind = quantized if weight.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: GGUFWriter, config: dict[str, Any]) -> None:
    read = json.loads(Path(BUNDLED_MODEL, "tokenizer.json").read_text())
    ids = read["model"]["vocab"] | {one["content"]: one["id"] for one in read["added_tokens"]}
    added = {one["content"] for one in read["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    assert len(tokens) == config["vocab_size"]
    merges = [one if isinstance(one, str) else " ".join(one) for one in read["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([_CONTROL if token in added else _NORMAL for token in tokens])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(Path(BUNDLED_MODEL, "chat_template.jinja").read_text())


def _tensors(config: dict[str, Any], head: bool) -> dict[str, Any]:
    """float32 arrays by their names in a GGUF file."""
    found = {}
    for name, tensor in load_file(Path(BUNDLED_MODEL, "model.safetensors")).items():
        weight = tensor.float().numpy()
        if name == "model.embed_tokens.weight":
            found["token_embd.weight"] = weight
            if head:
                found["output.weight"] = weight
        elif name == "model.norm.weight":
            found["output_norm.weight"] = weight
        else:
            _, _, layer, inner = name.removesuffix(".weight").split(".", 3)
            heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}.get(inner)
            found[f"blk.{layer}.{_NAMES[inner]}.weight"] = weight if heads is None else _permuted(weight, config[heads])
    return found


def _permuted(weight: Any, heads: int) -> Any:
    """Rows of queries and keys in the order in which llama.cpp rotates them: neighbours instead of halves."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
