"""Loads an unmodified transformers causal LM, and refuses one that trees cannot be verified on."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from model_runner.errors import InvalidValueError
from model_runner.loading.checkpoint import BUNDLED_MODEL, cannot_be_loaded, name_of, require_folder
from model_runner.loading.fingerprint import fingerprint
from model_runner.loading.tokenizer import Tokenizer, load_tokenizer
from model_runner.runners.base import Runner
from model_runner.runners.torch import attention
from model_runner.runners.torch.kv_cache import KVLayout, default_capacity
from model_runner.runners.torch.probe import probe
from model_runner.runners.torch.runner import TorchRunner
from model_runner.sampling.grammar import GrammarCompiler

__all__ = ["BUNDLED_MODEL", "LoadedModel", "adopt", "load_model"]

_log = logging.getLogger(__name__)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(eq=False, slots=True)
class LoadedModel:
    """A model that trees can be verified on, with what serving needs to know of it.

    Attributes:
        module: the transformers model, its attention replaced by `attention.tree_attention`.
        max_context: tokens of prompt and output together.
    """

    name: str
    module: Any
    tokenizer: Tokenizer
    grammars: GrammarCompiler
    layout: KVLayout
    parameters: int
    vocab_size: int
    max_context: int
    eos_token_ids: frozenset[int]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token."""
        return self.layout.bytes_per_token

    def default_kv_tokens(self, context: int, sequences: int) -> int:
        """KV capacity for `sequences` contexts of so many tokens, or for as many as the free memory allows.

        Raises:
            InvalidValueError: not even one fits.
        """
        return default_capacity(self.layout, context, sequences)

    def runner(self, kv_tokens: int, threads: int | None = None) -> Runner:
        """What computes steps of the model.

        Args:
            kv_tokens: capacity of its KV memory.
            threads: CPU threads of a step at most; None for the default of torch.
        """
        return TorchRunner(self.module, self.layout, kv_tokens, threads)

    @property
    def architecture(self) -> str:
        return type(self.module).__name__

    @property
    def dtype(self) -> str:
        return str(self.module.dtype).removeprefix("torch.")

    @property
    def exact(self) -> bool:
        """Outputs are bit-identical with and without drafts, in any batch."""
        return self.layout.exact

    @property
    def device(self) -> str:
        return str(self.layout.device)

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of model and tokenizer, the same wherever the same files are loaded."""
        return fingerprint(self.module, self.tokenizer)


def load_model(
    path_or_id: str = BUNDLED_MODEL,
    *,
    device: str = "auto",
    dtype: str = "auto",
    max_context: int | None = None,
    exact: bool | None = None,
) -> LoadedModel:
    """Loads a model and its tokenizer from a folder or from the hub (its cache, where the network is out of reach).

    Args:
        device: "cpu", "cuda", "cuda:1", ...; "auto" takes CUDA where there is one.
        dtype: "float32", "bfloat16" or "float16"; "auto" is float32 on a CPU and the checkpoint's own elsewhere.
        max_context: a smaller context than the model's own.
        exact: compute so that rounding does not depend on drafts and batch, on CPUs so far. None does so where the
            model computes in less than float32: there rounding decides tokens.

    Raises:
        InvalidValueError: device, dtype or max_context is not allowed.
        ModelNotFoundError: there is no such model.
        UnsupportedModelError: draft trees cannot be verified on it; gives the reason.
    """
    chosen_device = _device(device)
    if dtype != "auto" and dtype not in _DTYPES:
        raise InvalidValueError("dtype", dtype, f"it must be one of auto, {', '.join(_DTYPES)}")
    require_folder(path_or_id)
    disable_progress_bar()
    chosen_dtype = _DTYPES.get(dtype, torch.float32 if chosen_device.type == "cpu" else "auto")
    try:
        module: Any = AutoModelForCausalLM.from_pretrained(path_or_id, dtype=chosen_dtype)
    except (OSError, ValueError) as error:
        raise cannot_be_loaded(path_or_id, error) from error
    module = module.to(chosen_device).eval()
    return adopt(module, load_tokenizer(path_or_id), name=name_of(path_or_id), max_context=max_context, exact=exact)


def adopt(
    module: Any, tokenizer: Tokenizer, *, name: str, max_context: int | None = None, exact: bool | None = None
) -> LoadedModel:
    """Makes a transformers model in memory servable: checks that trees can be verified on it, and takes it over.

    Args:
        max_context, exact: as for `load_model`.

    Raises:
        InvalidValueError: max_context is not allowed.
        UnsupportedModelError: draft trees cannot be verified on the model; gives the reason.
    """
    attention.register()
    parameters = sum(p.numel() for p in module.parameters())
    layout = probe(module, module.dtype != torch.float32 if exact is None else exact)
    config: Any = module.config.get_text_config()
    return LoadedModel(
        name=name,
        module=module,
        tokenizer=tokenizer,
        grammars=tokenizer.grammars(int(config.vocab_size)),
        layout=layout,
        parameters=parameters,
        vocab_size=int(config.vocab_size),
        max_context=_max_context(config, max_context),
        eos_token_ids=_eos_token_ids(module),
    )


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise InvalidValueError("device", device, "it must be auto, cpu, cuda or cuda:N") from error
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise InvalidValueError("device", device, f"this machine has {torch.cuda.device_count()} CUDA devices")
    return chosen


def _max_context(config: Any, wanted: int | None) -> int:
    """The model's context, capped where its positions would start to depend on the batch."""
    limit = int(getattr(config, "max_position_embeddings", None) or 2**31 - 1)
    rope = getattr(config, "rope_parameters", None) or {}
    # These rescale all rotations once any position passes the original context: another request's would change ours.
    if rope.get("rope_type") in ("dynamic", "longrope"):
        original: Any = rope.get("original_max_position_embeddings")
        original = original or getattr(config, "original_max_position_embeddings", None)
        if original is not None and int(original) < limit:
            limit = int(original)
            _log.warning("rope type %s: the context is limited to %d tokens", rope["rope_type"], limit)
    if wanted is None:
        return limit
    if not 2 <= wanted <= limit:
        raise InvalidValueError("max_context", wanted, f"it must lie in [2, {limit}] for this model")
    return wanted


def _eos_token_ids(module: Any) -> frozenset[int]:
    ids = module.generation_config.eos_token_id if module.generation_config is not None else None
    if ids is None:
        ids = module.config.get_text_config().eos_token_id
    return frozenset([] if ids is None else [ids] if isinstance(ids, int) else ids)
