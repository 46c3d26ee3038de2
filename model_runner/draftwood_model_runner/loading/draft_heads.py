"""Draft heads: one layer that reads the hidden states of a target model, and guesses the token after the next.

A head's entry i has the features of token i of the target and token i + 1, and predicts token i + 2. Behind the last
token that the target has computed, the head's own output takes the place of the features.

The form of the checkpoints is that of EAGLE-3 (arXiv 2503.01840, github.com/SafeAILab/EAGLE), which vLLM and SGLang
read as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from draftwood_model_runner.errors import InvalidValueError
from draftwood_model_runner.loading.checkpoint import stored_tensors, weights_folder
from draftwood_model_runner.runners.base import KVShape
from draftwood_strategies.arrays import Float32Array, Int32Array

WEIGHTS = "model.safetensors"
_REFUSED = {"norm_before_fc": False, "attention_bias": False, "mlp_bias": False}
"""Variants of the form that no checkpoint that we could try has, and their usual values."""
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")


class DraftLayer(nn.Module):
    """The layer of a head: attention reads the embedding of a token beside its features."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, shape = config.hidden_size, _kv_shape(config)
        self.norms_residual = bool(getattr(config, "norm_before_residual", False))
        self.input_layernorm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, 0)
        for name, heads in (
            ("q_proj", config.num_attention_heads),
            ("k_proj", shape.kv_heads),
            ("v_proj", shape.kv_heads),
        ):
            setattr(self.self_attn, name, nn.Linear(2 * width, heads * shape.key_dim, bias=False))
        self.post_attention_layernorm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, attend: Any) -> torch.Tensor:
        """[B, T, d].

        Args:
            embedded, hidden: [B, T, d].
            attend: from [B, T, 2d] to [B, T, d].
        """
        normed = self.hidden_norm(hidden)
        residual = normed if self.norms_residual else hidden
        hidden = residual + attend(torch.cat([self.input_layernorm(embedded), normed], dim=-1))
        output: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class EagleHead(LlamaPreTrainedModel):
    """A draft head in the form of EAGLE-3.

    Args:
        config: of the head, with `draft_vocab_size`.

    Attributes:
        d2t: int64[draft vocabulary], what is added to a draft token to get that of the target.
        features: numbers that it reads of each token: an embedding and a hidden state.
        feature_layers_of_target: the layers of its target whose inputs it reads, see `loading.loaded.adopt`.
        shared: names of parameters that are the target's.
    """

    feature_layers_of_target: tuple[int, ...] = ()
    shared: frozenset[str] = frozenset()
    d2t: torch.Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.features = 2 * width
        self.fc = nn.Linear(3 * int(getattr(config, "target_hidden_size", None) or width), width, bias=False)
        self.midlayer = DraftLayer(config)
        self.norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.post_init()  # type: ignore[no-untyped-call]

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """Of its layers."""
        return (_kv_shape(self.config),)

    @property
    def token_ids(self) -> torch.Tensor:
        """int64[draft vocabulary], of each of its tokens that of the target."""
        return torch.arange(self.d2t.shape[0]) + self.d2t

    def layers_read(self, layers: int) -> tuple[int, ...]:
        """The layers of a target with so many whose inputs it reads, see `loading.loaded.adopt`."""
        config = self.config
        named = (getattr(config, "eagle_config", None) or {}).get("eagle_aux_hidden_state_layer_ids")
        named = named or getattr(config, "eagle_aux_hidden_state_layer_ids", None)
        return tuple(named) if named else (2, layers // 2, layers - 3)

    def forward(self, features: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """[B, T, d], what `logits` reads, and the hidden state that the next token is drafted from.

        Args:
            features: [B, T, 2d], embeddings and hidden states: such as `fc` makes of the target's features, or its
                own outputs.
            position_ids: int64[B, T].
        """
        embedded, hidden = features.chunk(2, dim=-1)
        rotation = self.rotary_emb(hidden, position_ids)

        def attend(inputs: torch.Tensor) -> torch.Tensor:
            attended: torch.Tensor = self.midlayer.self_attn(inputs, position_embeddings=rotation)[0]
            return attended

        output: torch.Tensor = self.midlayer(embedded, hidden, attend)
        return output

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, draft vocabulary] of [R, d]."""
        logits: torch.Tensor = self.lm_head(self.norm(hidden))
        return logits


def load_head(folder: str, width: int, layers: int, vocab_size: int) -> EagleHead:
    """The head in a folder, in float32, for a target of this shape.

    Args:
        width, layers, vocab_size: of the target.

    Raises:
        InvalidValueError: there is none, it has another form, or it is one of another target; names the setting
            `draft_head`.
    """

    def refused(problem: str) -> InvalidValueError:
        return InvalidValueError("draft_head", folder, problem)

    try:
        config = LlamaConfig.from_pretrained(folder)
        tensors = {_own_name(name): tensor for name, tensor in load_file(Path(folder) / WEIGHTS).items()}
    except Exception as error:
        raise refused(f"it must be a folder with config.json and {WEIGHTS}: {str(error).splitlines()[0]}") from error
    if not getattr(config, "draft_vocab_size", None):
        raise refused("its config.json must name draft_vocab_size, as heads in the form of EAGLE-3 do")
    for name, usual in _REFUSED.items():
        if getattr(config, name, usual) != usual:
            raise refused(f"{name} must be {usual}; another one is not supported")
    reads = int(getattr(config, "target_hidden_size", None) or config.hidden_size)
    if reads != width or config.hidden_size != width:
        raise refused(f"it must be a head for this model: that is {width} wide, and this head is for {reads}")
    tokens = tensors.get("d2t")
    if tokens is None and config.draft_vocab_size == vocab_size:
        tensors["d2t"] = tokens = torch.zeros(vocab_size, dtype=torch.int64)
    if tokens is None or int((torch.arange(tokens.shape[0]) + tokens).max()) >= vocab_size:
        raise refused(f"it must be a head for this model: its tokens are not among the {vocab_size:,} of the model")
    head = EagleHead(config)
    head.name_or_path = folder
    head.feature_layers_of_target = read = head.layers_read(layers)
    if not all(0 <= layer <= layers for layer in read):
        raise refused(f"it must be a head for this model: it reads layers {read}, and the model has {layers}")
    own = {name: tensor for name, tensor in tensors.items() if name in head.state_dict()}
    try:
        head.load_state_dict(own)
    except RuntimeError as error:
        raise refused(f"its weights do not fit its config.json: {str(error).splitlines()[1].strip()}") from error
    ready: EagleHead = head.float().eval()  # type: ignore[no-untyped-call]
    return ready


def _kv_shape(config: LlamaConfig) -> KVShape:
    """Of the layer of a head."""
    heads = int(config.num_attention_heads)
    head_dim = int(config.head_dim or config.hidden_size // heads)
    return KVShape(int(config.num_key_value_heads or heads), head_dim, head_dim)


def _own_name(name: str) -> str:
    """A weight's name as `EagleHead` has it: others call its layer the first one of a model."""
    return name.removeprefix("model.").replace("layers.0.", "midlayer.", 1)


class Embedding:
    """The embeddings of a target's tokens, read from its files where they are needed: no copy of them is held.

    Args:
        path_or_id: of the target.

    Raises:
        InvalidValueError: none of its safetensors files has them.
        ModelNotFoundError: the target's files are not there.
    """

    def __init__(self, path_or_id: str) -> None:
        files = stored_tensors(weights_folder(path_or_id))
        names = [name for name in files if name.endswith(_EMBEDDINGS)]
        if not names:
            problem = "the model's folder must have its embedding in safetensors files"
            raise InvalidValueError("draft_head", path_or_id, problem)
        name = min(names, key=len)  # an MTP module may repeat it
        with safe_open(files[name], framework="pt") as opened:
            weight = opened.get_tensor(name)
        self._is_bfloat16 = weight.dtype == torch.bfloat16
        self._weight = (weight.view(torch.int16) if self._is_bfloat16 else weight).numpy()

    def __call__(self, tokens: Int32Array) -> Float32Array:
        """float32[n, d] of int32[n]."""
        rows = self._weight[tokens]
        embedded: Float32Array = rows.astype(np.float32)
        if self._is_bfloat16:
            embedded = (rows.astype(np.int32) << 16).view(np.float32)
        return embedded
