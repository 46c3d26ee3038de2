"""Which model and tokenizer these are, whatever they are called and in whatever precision they run."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from model_runner.loading.tokenizer import Tokenizer

_ELEMENTS = 16


def fingerprint(module: Any, tokenizer: Tokenizer) -> str:
    """16 hexadecimal digits of the architecture, a few elements of every vector of weights and the whole tokenizer.

    Vectors (norms, biases) and the input embedding keep their layout on every device and in every packing; a model
    that was trained further differs in them. Weights count as bfloat16: a checkpoint is one model in all precisions, 8
    bits included. What one of them wrote makes good drafts for the others, and drafts decide no token.
    """
    digest = hashlib.sha256(type(module).__name__.encode())
    embedding = module.get_input_embeddings().weight
    vectors = [(name, weight) for name, weight in module.named_parameters() if weight.dim() == 1]
    for name, weight in [("embedding", embedding), *sorted(vectors)]:
        flat = weight.detach().reshape(-1)
        at = torch.linspace(0, flat.numel() - 1, min(_ELEMENTS, flat.numel())).long().to(flat.device)
        sample = flat[at].to(torch.bfloat16).view(torch.int16).cpu()
        digest.update(f"{name} {tuple(weight.shape)}".encode() + sample.numpy().tobytes())
    digest.update(tokenizer.definition().encode())
    return digest.hexdigest()[:16]
