"""The layers of a decoder, whose residuals are added within the norm that follows."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_outputs import MoeModelOutputWithPast

from draftwood_model_runner.runners.cuda.fusing.norms import FusedNorm


class FusedDecoder:
    """The embedding, all layers and the last norm of a model, see `families.Fusions.decoder`.

    Args:
        model: its norms are fused.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._layers = list(model.layers[: model.config.num_hidden_layers])
        self._first, *following = (_fused(layer.input_layernorm) for layer in self._layers)
        self._following = [*following, _fused(model.norm)]
        self._middle = [_fused(layer.post_attention_layernorm) for layer in self._layers]

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **kwargs: Any) -> MoeModelOutputWithPast:
        """Hidden states [1, T, size] of tokens and positions int64[1, T]; within a step."""
        residual = self._model.embed_tokens(input_ids)
        rotation = self._model.rotary_emb(residual, position_ids=position_ids)
        normed = self._first(residual)
        for layer, middle, following in zip(self._layers, self._middle, self._following, strict=True):
            attended, _ = layer.self_attn(
                hidden_states=normed, position_embeddings=rotation, attention_mask=None, position_ids=position_ids
            )
            residual, normed = middle.of_sum(residual, attended)
            residual, normed = following.of_sum(residual, layer.mlp(normed))
        return MoeModelOutputWithPast(last_hidden_state=normed)


def _fused(norm: Any) -> FusedNorm:
    forward = norm.forward
    assert isinstance(forward, FusedNorm)
    return forward
