"""Multi-head latent attention (MLA) over what its cache is meant to hold: a latent and a rotated key for each token.

DeepSeek V2 and its successors project a short latent to the keys and values of all heads; all heads share one rotated
key besides. transformers' modules do so in their method `expand_kv`. Here the method hands on both as they are, and
they are kept in place of keys and values: 576 numbers a token in DeepSeek V3 instead of 40,960.

A query attends to the latents themselves if few do, with the projection multiplied into query and output (absorbed, see
DeepSeek V2, arXiv 2405.04434). For many queries it is cheaper to expand what they attend to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from draftwood_model_runner.runners.base import KVShape

_METHOD = "expand_kv"
_EXPANDED_NUMBERS = 1 << 26
"""Numbers of expanded keys and values at most: 256 MB in float32."""
_ABSORBED_COST = 1.7
"""Time of a product over latents, relative to one over keys and values. Found by steps of 1 to 512 tokens in contexts
to 8,192 on a CPU; see docs/decisions/models-at-load.md."""
_SCORES = 1 << 24
"""Scores that are computed at once: 64 MB."""
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference, relative to the largest number, of keys and values that two forms of one projection compute."""


class LatentProjection:
    """Takes the place of the method `expand_kv` of a module: hands on latents and rotated keys.

    Args:
        module: whose `expand_kv` takes latents [1, 1, T, rank] and rotated keys [1, 1, T, rope], and returns keys
            [1, head, T, nope + rope] and values [1, head, T, value_dim].

    Attributes:
        shape: what is kept of a token: the latent and the rotated key, one after the other.

    Raises:
        ValueError: the method computes something else than a projection of the latents.
    """

    @torch.no_grad()
    def __init__(self, module: Any) -> None:
        self._module = module
        self._rank, rope = int(module.kv_lora_rank), int(module.qk_rope_head_dim)
        self.shape = KVShape(1, self._rank + rope, 0)
        weight = module.kv_b_proj.weight
        like = {"dtype": weight.dtype, "device": weight.device}
        one_by_one = torch.eye(self._rank, **like)[None, None]
        keys, values = self._expand(one_by_one, torch.zeros(1, 1, self._rank, rope, **like))
        self._nope = keys.shape[-1] - rope
        self._to_latent = keys[0, :, :, : self._nope].transpose(1, 2).contiguous()  # [head, nope, rank]
        self._to_value = values[0].contiguous()  # [head, rank, value_dim]
        self._check(like)

    def __call__(self, latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, 1, T, rank + rope], and no values."""
        return torch.cat([latents, rotated], -1), latents[..., :0]

    def absorbs(self, queries: int, entries: int) -> bool:
        """Whether it takes less time for so many queries to attend to the latents of `entries` tokens."""
        heads, rank, size = self._to_value.shape
        if entries * heads * (self._nope + size) > _EXPANDED_NUMBERS:
            return True
        projected, rope = rank * (self._nope + size), self.shape.key_dim - rank
        absorbed = queries * (entries * (2 * rank + rope) + projected)
        expanded = entries * (projected + queries * (self._nope + rope + size))
        return _ABSORBED_COST * absorbed <= expanded

    def expanded(self, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [head, n, nope + rope] and values [head, n, value_dim] of entries [1, n, rank + rope]."""
        keys, values = self._expand(entries[None, ..., : self._rank], entries[None, ..., self._rank :])
        return keys[0], values[0]

    def attend(
        self, query: torch.Tensor, entries: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
    ) -> torch.Tensor:
        """Attention over the latents themselves.

        Args:
            query: [head, q, nope + rope].
            entries: [n, rank + rope].
            mask: [q, n], 0 or -inf; None if all queries attend to all entries.

        Returns:
            [q, head, value_dim].
        """
        heads, count, size = query.shape
        scaling = size**-0.5 if scaling is None else scaling
        rows = max(1, _SCORES // (heads * entries.shape[0]))
        parts = []
        for begin in range(0, count, rows):
            part = query[:, begin : begin + rows]
            parts.append(self._attend(part, entries, None if mask is None else mask[begin : begin + rows], scaling))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(
        self, query: torch.Tensor, entries: torch.Tensor, mask: torch.Tensor | None, scaling: float
    ) -> torch.Tensor:
        heads, count, _ = query.shape
        in_latents = torch.cat([torch.bmm(query[..., : self._nope], self._to_latent), query[..., self._nope :]], -1)
        scores = (in_latents.view(heads * count, -1) @ entries.T).view(heads, count, -1) * scaling
        if mask is not None:
            scores += mask
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(entries.dtype)
        means = weights.view(heads * count, -1) @ entries[:, : self._rank]
        return torch.bmm(means.view(heads, count, -1), self._to_value).transpose(0, 1)

    def _expand(self, latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = getattr(type(self._module), _METHOD)(self._module, latents, rotated)
        return keys, values

    def _check(self, like: dict[str, Any]) -> None:
        generator = torch.Generator(like["device"]).manual_seed(0)
        entries = torch.randn(8, self.shape.key_dim, generator=generator, **like)
        keys, values = self.expanded(entries[None])
        latents, rotated = entries[None, :, : self._rank], entries[None, :, self._rank :]
        projected = torch.cat([latents @ self._to_latent.transpose(1, 2), rotated.expand(len(keys), -1, -1)], -1)
        for projected_part, expected in ((projected, keys), (latents @ self._to_value, values)):
            differing = (projected_part - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
            if not float(differing) <= _TOLERANCE[expected.dtype]:
                raise ValueError(f"{type(self._module).__name__}.{_METHOD} is no projection of the latents alone")


def keep_latents(module: Any) -> dict[int, KVShape]:
    """Lets the attention modules of a model hand on latents instead of keys and values.

    Returns what is kept then of a token, by number of the layer; nothing for a model without any.

    Raises:
        ValueError: one computes something else than a projection.
    """
    attentions = [part for part in module.modules() if _has_latents(part)]
    projections = [LatentProjection(part) for part in attentions]
    for part, projection in zip(attentions, projections, strict=True):
        setattr(part, _METHOD, projection)
    return {part.layer_idx: projection.shape for part, projection in zip(attentions, projections, strict=True)}


def keep_expanded(module: Any) -> None:
    """Takes `keep_latents` back."""
    for part in module.modules():
        vars(part).pop(_METHOD, None)


def latent_projection(attention: nn.Module) -> LatentProjection | None:
    """What projects the latents of a module that `keep_latents` found."""
    projection = vars(attention).get(_METHOD)
    return projection if isinstance(projection, LatentProjection) else None


def _has_latents(part: nn.Module) -> bool:
    names = (_METHOD, "kv_b_proj", "kv_lora_rank", "qk_rope_head_dim", "layer_idx")
    return all(getattr(part, name, None) is not None for name in names)
