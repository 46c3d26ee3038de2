"""The fingerprint of model and tokenizer: what it tells apart, and what it does not depend on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL
from draftwood_model_runner.loading.loaded import fingerprint
from draftwood_model_runner.loading.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(BUNDLED_MODEL)


def bundled(dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=dtype)


def test_a_checkpoint_is_one_model_in_all_precisions(tokenizer: Tokenizer) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    assert len({fingerprint(bundled(dtype), tokenizer) for dtype in dtypes}) == 1


def test_an_adapter_merged_into_one_matrix_makes_another_model(tokenizer: Tokenizer) -> None:
    """Norms, biases and the embedding are those of the model that it was trained on."""
    module = bundled()
    before = fingerprint(module, tokenizer)
    for name, weight in list(module.named_parameters()):
        if weight.dim() < 2:
            continue
        kept = weight.detach().clone()
        with torch.no_grad():
            weight += 0.1  # of rank one
            assert fingerprint(module, tokenizer) != before, name
            weight.copy_(kept)
    assert fingerprint(module, tokenizer) == before


class _Quantized(torch.Tensor):
    """Stands for other numbers, and can nothing but say which, as torchao's tensors."""

    weight: torch.Tensor

    @staticmethod
    def __new__(cls, weight: torch.Tensor) -> _Quantized:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)
        made.weight = weight
        return made  # type: ignore[no-any-return]

    def dequantize(self) -> torch.Tensor:
        return self.weight

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(arguments[0].weight)
        raise NotImplementedError(function)


def test_quantized_weights_count_as_what_they_stand_for(tokenizer: Tokenizer) -> None:
    module, plain = bundled(), bundled()
    for part in module.model.layers.modules():
        if isinstance(part, torch.nn.Linear):
            part.weight = torch.nn.Parameter(_Quantized(part.weight.detach()), requires_grad=False)
    assert isinstance(module.model.layers[0].mlp.up_proj.weight.detach(), _Quantized)
    assert fingerprint(module, tokenizer) == fingerprint(plain, tokenizer)


def test_the_vocabulary_counts_and_its_order_and_file_do_not(tokenizer: Tokenizer) -> None:
    module, tokens = bundled(), tokenizer.token_ids()
    first, second, *_ = sorted(tokens)

    def fingerprint_with(vocabulary: dict[str, int]) -> str:
        stub: Any = SimpleNamespace(token_ids=lambda: vocabulary)
        return fingerprint(module, stub)

    before = fingerprint(module, tokenizer)
    assert fingerprint_with(dict(reversed(tokens.items()))) == before
    assert fingerprint_with(tokens | {first: tokens[second], second: tokens[first]}) != before
    assert fingerprint_with(tokens | {"<added>": len(tokens)}) != before
