"""Tiny random models of the families that Draftwood serves, and what transformers itself writes with them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    GPTNeoXConfig,
    LlamaConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    MistralConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftwood_model_runner.loading.model import BUNDLED_MODEL, LoadedModel, adopt, load_model
from draftwood_model_runner.loading.tokenizer import Tokenizer
from draftwood_model_runner.request import SamplingParams, StopParams
from draftwood_model_runner.runners.torch.runner import TorchRunnerFactory
from draftwood_model_runner.sampling.draws import gumbel_noise
from draftwood_strategies.arrays import Int32Array

VOCAB = 256
HAS_AMX: bool = torch.cpu._is_amx_tile_supported()
"""Whether products in bfloat16 take other kernels for other numbers of rows here."""
WINDOW = 12
"""Sliding window of the families that have one: shorter than most prompts of the tests."""

_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    # Wide enough that attention matters and the largest logit stands clear of the next one.
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_GQA: dict[str, Any] = {"num_key_value_heads": 2}
_SLIDING: dict[str, Any] = {"sliding_window": WINDOW}

_CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**_SHAPE, **_GQA),
    "qwen2": lambda: Qwen2Config(**_SHAPE, **_GQA),
    "qwen2-sliding": lambda: Qwen2Config(**_SHAPE, **_GQA, **_SLIDING, use_sliding_window=True, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**_SHAPE, **_GQA, head_dim=32),
    "mistral": lambda: MistralConfig(**_SHAPE, **_GQA, sliding_window=None),
    "mistral-sliding": lambda: MistralConfig(**_SHAPE, **_GQA, **_SLIDING),
    "gpt-neox": lambda: GPTNeoXConfig(**_SHAPE),
    # Window and soft-capping at once, layers with and without the window in turn.
    "gemma2": lambda: Gemma2Config(
        **_SHAPE, **_GQA, **_SLIDING, head_dim=32, query_pre_attn_scalar=32, attn_logit_softcapping=5.0
    ),
    "phi": lambda: PhiConfig(**_SHAPE),
}
RANDOM_FAMILIES = tuple(_CONFIGS)
FAMILIES = (*RANDOM_FAMILIES, "bundled")
OPENVINO_FAMILIES = tuple(family for family in FAMILIES if family != "gemma2")
"""Those that the openvino runner computes; Gemma 2 has soft-capping."""


def with_runners(families: Iterable[str], by_openvino: Iterable[str]) -> list[tuple[str, str]]:
    """Families with the runner torch, and some with OpenVINO as well."""
    return [*((family, "torch") for family in families), *((family, "openvino") for family in by_openvino)]


def _plain(family: str) -> Any:
    if family == "bundled":
        return AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32).eval()
    return tiny(family)


def tiny(family: str, **changes: Any) -> Any:
    """A tiny random model of a random family, the same each time; `changes` are to its config."""
    torch.manual_seed(0)
    config = _CONFIGS[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    if kinds := getattr(config, "layer_types", None):
        config.layer_types = kinds[: config.num_hidden_layers]
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    return module.eval()


@functools.cache
def reference(family: str) -> Any:
    """The family's model as transformers runs it."""
    return _plain(family)


@functools.cache
def served(family: str, runner: str = "torch") -> LoadedModel:
    """The family's model as Draftwood runs it."""
    if family == "bundled":
        return load_model(BUNDLED_MODEL, dtype="float32", max_context=512, runner=runner)
    return adopted(family, torch.float32, exact=None, runner=runner)


def adopted(family: str, dtype: torch.dtype, exact: bool | None = True, runner: str = "torch") -> LoadedModel:
    """A tiny random model of the family as Draftwood runs it."""
    return taken_over(_plain(family).to(dtype), name=family, exact=exact, runner=runner)


def taken_over(module: Any, **options: Any) -> LoadedModel:
    """A model of transformers as Draftwood runs it, with the bundled model's tokenizer."""
    tokenizer = Tokenizer(AutoTokenizer.from_pretrained(BUNDLED_MODEL))
    return adopt(module, tokenizer, **{"name": "tiny", **options})


def torch_factory(model: LoadedModel) -> TorchRunnerFactory:
    """A model's module and layout, where torch computes it."""
    assert isinstance(model.factory, TorchRunnerFactory)
    return model.factory


@functools.cache
def greedy(family: str, prompt: tuple[int, ...], new_tokens: int) -> list[int]:
    """What transformers' own greedy `generate` writes after the prompt."""
    return generate(reference(family), prompt, new_tokens)


@torch.inference_mode()
def generate(module: Any, prompt: Iterable[int], new_tokens: int, **options: Any) -> list[int]:
    """What transformers' own greedy `generate` writes after the prompt, under further options."""
    ids = torch.tensor([[*map(int, prompt)]], device=module.device)
    fixed: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    written: list[int] = module.generate(ids, attention_mask=torch.ones_like(ids), **fixed, **options)[0].tolist()
    return written[ids.shape[1] :]


@torch.inference_mode()
def generate_with_gaps(
    module: Any, prompt: Iterable[int], new_tokens: int, *processors: LogitsProcessor
) -> tuple[list[int], list[float]]:
    """What greedy `generate` writes, and how far the two best scores of each step are apart, over the largest logit."""
    ids = torch.tensor([[*map(int, prompt)]])
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    options |= {"output_logits": True, "output_scores": True, "return_dict_in_generate": True}
    options["logits_processor"] = LogitsProcessorList(processors)
    found = module.generate(ids, attention_mask=torch.ones_like(ids), **options)
    best, largest = torch.cat(found.scores).topk(2).values, torch.cat(found.logits).abs().amax(1)
    return found.sequences[0, ids.shape[1] :].tolist(), ((best[:, 0] - best[:, 1]) / largest).tolist()


class Penalties(LogitsProcessor):
    """Presence and frequency penalties, which transformers lacks: over the new tokens only."""

    def __init__(self, params: SamplingParams, prompt_length: int) -> None:
        self._params, self._prompt_length = params, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores, new = scores.clone(), input_ids[0, self._prompt_length :].tolist()
        for token in new:
            scores[0, token] -= self._params.frequency_penalty
        for token in set(new):
            scores[0, token] -= self._params.presence_penalty
        return scores


class Noise(LogitsProcessor):
    """Turns the greedy choice of `generate` into a sample: by Draftwood's noise, which depends on seed and position."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        noise = gumbel_noise(scores.shape[1], self._seed, input_ids.shape[1])
        return scores.double() + torch.from_numpy(noise)


def written_by(module: Any, prompt: tuple[int, ...], params: SamplingParams, stop: StopParams) -> list[int]:
    """What transformers' `generate` writes with its own processors, and the noise last."""
    processors: list[Any] = [Penalties(params, len(prompt))]
    if params.repetition_penalty != 1.0:
        processors.insert(0, RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.logit_bias:
        processors.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in params.logit_bias]))
    own = module.generation_config.eos_token_id
    ends = sorted(stop.token_ids | ({own} if isinstance(own, int) else {*(own or ())}))
    if stop.token_ids:
        processors.append(MinNewTokensLengthLogitsProcessor(len(prompt), stop.min_tokens, ends))
    if params.temperature:
        processors.append(TemperatureLogitsWarper(params.temperature))
        if params.top_k:
            processors.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1.0:
            processors.append(TopPLogitsWarper(params.top_p))
        if params.min_p:
            processors.append(MinPLogitsWarper(params.min_p))
        processors.append(Noise(params.seed))
    options: dict[str, Any] = {"logits_processor": LogitsProcessorList(processors)}
    if stop.token_ids:
        options["eos_token_id"] = ends
    return generate(module, prompt, stop.max_tokens, **options)


@functools.cache
def expected(family: str, prompt: tuple[int, ...], params: SamplingParams, stop: StopParams) -> list[int]:
    """What transformers' `generate` writes with the family's model: the oracle of all comparisons."""
    return written_by(reference(family), prompt, params, stop)


def as_prompt(tokens: tuple[int, ...] | list[int]) -> Int32Array:
    return np.array(tokens, np.int32)
