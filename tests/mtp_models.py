"""Tiny random checkpoints with a module for multi-token prediction (MTP), and what the module computes by layers of
transformers alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL
from draftwood_model_runner.runners.shrinking import randomized

LAYERS = 2
WIDTH = 64
_WEIGHTS = "model.safetensors"
_SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS + 1,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED: dict[str, Any] = {**_EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
_FULL, _RECURRENT = "full_attention", "linear_attention"
CONFIGS: dict[str, Any] = {
    "glm4_moe": lambda: tf.Glm4MoeConfig(
        **_SHAPE | {"num_key_value_heads": 2, "head_dim": 16}, **_ROUTED, use_qk_norm=True
    ),
    "deepseek_v3": lambda: tf.DeepseekV3Config(
        **_SHAPE,
        **_ROUTED,
        kv_lora_rank=32,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    ),
    "qwen3_next": lambda: tf.Qwen3NextConfig(
        **_SHAPE | {"num_key_value_heads": 2, "tie_word_embeddings": True},
        **_EXPERTS,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        shared_expert_intermediate_size=32,
        layer_types=[_RECURRENT, _FULL, _FULL],
    ),
}
"""The last of their layers becomes that of the module."""
_OF_DEEPSEEK = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "projection": "eh_proj", "norm": "shared_head.norm"}
_OF_QWEN = {
    "embedding_norm": "pre_fc_norm_embedding",
    "hidden_norm": "pre_fc_norm_hidden",
    "projection": "fc",
    "norm": "norm",
}


class Module(NamedTuple):
    """A module beside its model.

    Attributes:
        target: the model, as transformers loads the checkpoint.
        layer, rotary: of transformers' own class.
        embedding_norm, hidden_norm, norm: likewise.
        projection: [d, 2d].
        embedding, output: [vocab, d].
    """

    target: Any
    layer: Any
    rotary: Any
    embedding_norm: Any
    hidden_norm: Any
    norm: Any
    projection: torch.Tensor
    embedding: torch.Tensor
    output: torch.Tensor

    @torch.no_grad()
    def features(self, text: list[int]) -> torch.Tensor:
        """[1, T, d], behind the final norm of the model."""
        features: torch.Tensor = self.target.model(torch.tensor([text])).last_hidden_state
        return features

    @torch.no_grad()
    def computed(self, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """[1, T, d] of T entries: the token that follows each, and its hidden state, [1, T, d]."""
        positions = torch.arange(len(tokens))[None]
        embedded = nn.functional.embedding(torch.tensor([tokens]), self.embedding)
        inputs = torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], dim=-1) @ self.projection.T
        rotation = self.rotary(inputs, positions)
        # No mask stands for a causal one in transformers' call of torch's attention.
        output = self.layer(inputs, attention_mask=None, position_ids=positions, position_embeddings=rotation)
        normed: torch.Tensor = self.norm(output)
        return normed

    def path_log_probability(self, text: list[int], path: list[int]) -> float:
        """What the module gives to a path behind a text, level by level."""
        hidden, tokens, total = self.features(text)[:, :-1], text[1:], 0.0
        for token in path:
            output = self.computed(tokens, hidden)
            total += float((output[0, -1] @ self.output.T).log_softmax(-1)[token])
            hidden, tokens = torch.cat([hidden, output[:, -1:]], dim=1), [*tokens, token]
        return total


def write_with_module(folder: Path, family: str, right: bool = False) -> Module:
    """Writes a checkpoint with a module under the names of its published models, and the bundled model's tokenizer.

    DeepSeek's has another output head than the model here.

    Args:
        right: what the model writes depends on its last token alone, and the module predicts it always.
    """
    torch.manual_seed(0)
    config = CONFIGS[family]()
    whole: Any = randomized(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())
    if not config.tie_word_embeddings:
        whole.lm_head.weight.data *= 4  # sure enough of its tokens that drafts have several levels
    if right:
        _predict_by_last_token(whole)
    whole.save_pretrained(folder)
    stored = load_file(folder / _WEIGHTS)
    behind = f"model.layers.{LAYERS}."
    is_qwen = family == "qwen3_next"
    prefix, names = ("mtp.", _OF_QWEN) if is_qwen else (behind, _OF_DEEPSEEK)
    tensors = {
        name.replace(behind, "mtp.layers.0.") if is_qwen else name: tensor.contiguous()
        for name, tensor in stored.items()
    }
    parts: dict[str, Any] = {
        "embedding_norm": _normed(whole, right),
        "hidden_norm": _normed(whole, right),
        "norm": whole.model.norm if right else _normed(whole, right),
        "projection": torch.eye(WIDTH, 2 * WIDTH) if right else 0.2 * torch.randn(WIDTH, 2 * WIDTH),
    }
    for part, name in names.items():
        tensor = parts[part] if part == "projection" else parts[part].weight.detach()
        tensors[f"{prefix}{name}.weight"] = tensor.clone()
    embedding = stored["model.embed_tokens.weight"]
    output = stored.get("lm_head.weight", embedding)
    if not is_qwen:  # published checkpoints repeat both
        if family == "deepseek_v3" and not right:
            output = 0.2 * torch.randn_like(output)
        tensors[f"{prefix}embed_tokens.weight"] = embedding.clone()
        tensors[f"{prefix}shared_head.head.weight"] = output.clone()
    save_file(tensors, folder / _WEIGHTS, {"format": "pt"})
    change_config(folder, num_hidden_layers=LAYERS, **({"layer_types": [_RECURRENT, _FULL]} if is_qwen else {}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(BUNDLED_MODEL) / name, folder)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    decoder = whole.model
    return Module(target, decoder.layers[LAYERS], decoder.rotary_emb, **parts, embedding=embedding, output=output)


def change_config(folder: Path, **values: Any) -> None:
    """Writes other values to a checkpoint's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_tensors(folder: Path, changed: dict[str, torch.Tensor], without: str = "nothing") -> None:
    """Writes other tensors to a checkpoint, and leaves out those whose name has `without`."""
    tensors = {name: tensor for name, tensor in load_file(folder / _WEIGHTS).items() if without not in name}
    save_file(tensors | changed, folder / _WEIGHTS, {"format": "pt"})


def _normed(whole: Any, right: bool) -> Any:
    """A norm of the model's kind."""
    norm = type(whole.model.norm)(WIDTH, eps=whole.config.rms_norm_eps)
    if not right:
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    return norm.requires_grad_(False)


@torch.no_grad()
def _predict_by_last_token(whole: Any) -> None:
    """Lets no layer add anything to the embeddings."""
    for name, weight in whole.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
            weight.zero_()
