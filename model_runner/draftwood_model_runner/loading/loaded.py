"""A model of transformers becomes one that can be served: its runner, context, fingerprint and facts."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.tensor import DTensor

from draftwood_model_runner.engine_config import Abilities, check_runner, check_weights
from draftwood_model_runner.errors import InvalidValueError, UnsupportedRunnerError
from draftwood_model_runner.loading.checkpoint import cannot_be_loaded
from draftwood_model_runner.loading.facts import DraftModelFacts, ModelFacts
from draftwood_model_runner.loading.tokenizer import Tokenizer
from draftwood_model_runner.runners.base import HeadParts, RunnerFactory
from draftwood_model_runner.runners.model_calls import layer_list
from draftwood_model_runner.runners.shrinking import CONTEXT, rotation_limit
from draftwood_model_runner.runners.trials import try_beyond_thresholds
from draftwood_model_runner.sampling.generation_defaults import eos_token_ids, generation_defaults
from draftwood_model_runner.sampling.grammar import GrammarCompiler

_log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_UNLIMITED, _UNNAMED = 2**31 - 1, 32_768
"""Tokens of context: at most, and if the model names no limit and none is set."""
_ELEMENTS = 16
_FLOAT8 = {torch.float8_e4m3fn, torch.float8_e5m2}
_SMALLEST = 2.0**-14
"""Below it, float16 has fewer digits than bfloat16."""


class DraftModel(NamedTuple):
    """A model that drafts beside a target.

    Attributes:
        name: that clients see: of the model, or of the folder of the head.
        factory: as its runner computes it.
        head: what a head needs besides; None for a whole model.
        parameters: weights, those that it shares with the target aside.
    """

    name: str
    factory: RunnerFactory
    head: HeadParts | None
    parameters: int


@dataclass(frozen=True, eq=False, kw_only=True)
class LoadedModel(ModelFacts):
    """A model that trees can be verified on, with what serving needs to know of it.

    Attributes:
        factory: the model as its runner computes it; makes runners.
        step_times_file: where what its steps cost is kept; None for a model that is converted at each start.
        drafters: models that draft for it, by the names of their strategies.
    """

    name: str
    factory: RunnerFactory
    tokenizer: Tokenizer
    grammars: GrammarCompiler
    step_times_file: Path | None = None
    drafters: Mapping[str, DraftModel] = field(default_factory=dict)

    @property
    def runner_name(self) -> str:
        """The kind of runner that computes the model: "cuda", "openvino" or "torch"."""
        return self.factory.name

    @property
    def draft_models(self) -> tuple[DraftModelFacts, ...]:
        """What is known of `drafters`."""
        return tuple(
            DraftModelFacts(strategy, drafter.name, drafter.parameters) for strategy, drafter in self.drafters.items()
        )

    @property
    def abilities(self) -> Abilities:
        """Those of Draftwood's own engine."""
        return Abilities()

    @property
    def exact(self) -> bool:
        """Outputs are bit-identical with and without drafts, in any batch."""
        return self.factory.exact


def choose_runner(
    module: Any,
    runner: str,
    exact: bool | None,
    max_context: int,
    weights: str = "as-is",
    threads: int | None = None,
    feature_layers: tuple[int, ...] = (),
) -> tuple[RunnerFactory, str]:
    """The model as a runner computes it, and why by this runner.

    Args:
        module: an unmodified transformers model. The torch and cuda runners take it over, see `runners.torch.probe`;
            the openvino runner leaves it as it was.
        runner, exact, weights, threads: as for `loading.model.load_model`.
        feature_layers: as for `adopt`.

    Raises:
        InvalidValueError: there is no such runner, it has no exact mode, or no runner has such weights for this model.
        UnsupportedRunnerError: OpenVINO or CUDA is chosen by name and cannot compute the model.
        UnsupportedModelError: draft trees cannot be verified on the model; gives the reason.
    """
    check_runner(runner, exact)
    check_weights(weights, runner, exact)
    if weights != "as-is":
        return _quantized(module, max_context, threads, weights, feature_layers), f"weights are {weights}"
    if runner == "torch":
        return _torch(module, exact, max_context, feature_layers), "chosen by name"
    if runner == "openvino":
        return _openvino(module, bool(exact), max_context, threads, feature_layers=feature_layers), "chosen by name"
    if runner == "cuda":
        return _cuda(module, max_context, bool(exact), feature_layers), "chosen by name"
    on_gpu = module.device.type == "cuda"
    try:
        if on_gpu:
            factory = _cuda(module, max_context, bool(exact), feature_layers)
            reason = f"the model is on {module.device}"
        else:
            factory = _openvino(module, bool(exact), max_context, threads, feature_layers=feature_layers)
            reason = "the model is on a CPU"
    except UnsupportedRunnerError as error:
        factory, reason = _torch(module, exact, max_context, feature_layers), str(error)
    _log.log(
        logging.WARNING if on_gpu and factory.name != "cuda" else logging.INFO, "runner %s: %s", factory.name, reason
    )
    return factory, reason


def _cuda(module: Any, max_context: int, exact: bool, feature_layers: tuple[int, ...]) -> RunnerFactory:
    from draftwood_model_runner.runners.cuda.device import require_triton

    require_triton(module.device)
    # Kernels, which Triton must have been made ready for.
    from draftwood_model_runner.runners.cuda.factory import take_over

    return take_over(module, max_context, exact, feature_layers)


def _torch(module: Any, exact: bool | None, max_context: int, feature_layers: tuple[int, ...]) -> RunnerFactory:
    # Imports the modelling code of transformers, which a model in the cache does without.
    from draftwood_model_runner.runners.torch.probe import probe
    from draftwood_model_runner.runners.torch.runner import TorchRunnerFactory

    if feature_layers:
        layer_list(module)  # raises for a model that does not show them
    layout = probe(module, module.dtype != torch.float32 if exact is None else exact, max_context)
    return TorchRunnerFactory(module, layout, feature_layers)


def _quantized(
    module: Any, max_context: int, threads: int | None, weights: str, feature_layers: tuple[int, ...]
) -> RunnerFactory:
    try:
        return _openvino(module, False, max_context, threads, weights, feature_layers)
    except UnsupportedRunnerError as error:
        raise InvalidValueError("weights", weights, f"it must be as-is for this model; {error}") from error


def _openvino(
    module: Any,
    exact: bool,
    max_context: int,
    threads: int | None,
    weights: str = "as-is",
    feature_layers: tuple[int, ...] = (),
) -> RunnerFactory:
    if module.device.type != "cpu":
        raise UnsupportedRunnerError(f"OpenVINO: runs on CPUs only, the model is on {module.device}")
    if exact:
        raise UnsupportedRunnerError("OpenVINO: has no exact mode")
    if find_spec("openvino") is None:
        raise UnsupportedRunnerError("OpenVINO: the package openvino is not installed")
    # A package that need not be there, and takes half a second to import.
    from draftwood_model_runner.runners.openvino.factory import take_over

    factory = take_over(module, max_context, weights=weights, threads=threads, feature_layers=feature_layers)
    try_beyond_thresholds(module, max_context, lambda copied: take_over(copied, CONTEXT))
    return factory


def load_module(path_or_id: str, device: torch.device, dtype: str, **options: Any) -> Any:
    """The model of transformers; of a multimodal one its text part.

    Args:
        options: of `from_pretrained`.

    Raises:
        ModelNotFoundError: there is no such model, or its files lack weights.
    """
    # Imports the modelling code of transformers, which a model in the cache does without.
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from draftwood_model_runner.loading.text_part import is_multimodal, load_text_part

    disable_progress_bar()
    chosen_dtype = DTYPES.get(dtype, torch.float32 if device.type == "cpu" else "auto")

    def load(loader: Any, **others: Any) -> Any:
        module, info = loader.from_pretrained(
            path_or_id, dtype=chosen_dtype, output_loading_info=True, **options, **others
        )
        if missing := sorted(info["missing_keys"]):
            raise ValueError(f"its files have no weights for {missing[0]}, {len(missing)} in all")
        return (module if options else module.to(device)).eval()

    try:
        config = AutoConfig.from_pretrained(path_or_id)
        if not options and _quantization(config):
            # Some are laid out for the device that they are loaded on, and cannot be moved.
            options = {"device_map": {"": device}}
        return load_text_part(config, load) if is_multimodal(config) else load(AutoModelForCausalLM)
    except SafetensorError as error:  # as of a file that was not copied to its end
        raise cannot_be_loaded(path_or_id, error, "weights") from error
    except (ImportError, OSError, RuntimeError, ValueError) as error:  # ImportError: of what reads quantized weights
        raise cannot_be_loaded(path_or_id, error) from error


def adopt(
    module: Any,
    tokenizer: Tokenizer,
    *,
    name: str,
    max_context: int | None = None,
    exact: bool | None = None,
    runner: str = "torch",
    weights: str = "as-is",
    defaults: str = "model",
    threads: int | None = None,
    feature_layers: tuple[int, ...] = (),
) -> LoadedModel:
    """Makes a transformers model in memory servable: checks that trees can be verified on it, and takes it over.

    Args:
        max_context, exact, runner, weights, threads: as for `load_model`. The torch runner changes the module,
            OpenVINO does not.
        defaults: as generation_defaults there.
        feature_layers: the layers whose inputs a step shows as `Predictions.features`, one beside the other; the
            number of layers stands for what the output head reads.

    Raises:
        InvalidValueError: max_context, runner or weights is not allowed, or the runner has no exact mode.
        UnsupportedModelError: draft trees cannot be verified on the model; gives the reason.
    """
    config: Any = module.config.get_text_config()
    context = _max_context(config, max_context)
    parameters = sum(p.numel() for p in module.parameters())
    dtype = str(module.dtype).removeprefix("torch.")
    identity = fingerprint(module, tokenizer)
    ends = eos_token_ids(module)
    tokenizer.check_ends(ends)
    grammars = tokenizer.grammars(int(config.vocab_size), ends)
    grammars.prepare()
    factory, reason = choose_runner(module, runner, exact, context, weights, threads, feature_layers)
    return LoadedModel(
        name=name,
        factory=factory,
        runner_reason=reason,
        tokenizer=tokenizer,
        grammars=grammars,
        architecture=type(module).__name__,
        dtype=dtype,
        weights=weights if weights != "as-is" else _quantization(config) or dtype,
        device=str(module.device),
        fingerprint=identity,
        parameters=parameters,
        vocab_size=int(config.vocab_size),
        max_context=context,
        eos_token_ids=ends,
        defaults=generation_defaults(type(module).__name__, module.generation_config, defaults, int(config.vocab_size)),
    )


def _quantization(config: Any) -> str:
    """How the weights of a checkpoint are quantized; "" if they are not."""
    config = getattr(config, "quantization_config", None)
    method = config.get("quant_method", "") if isinstance(config, dict) else getattr(config, "quant_method", "")
    return str(getattr(method, "value", method))


def configured_context(path_or_id: str, wanted: int | None) -> tuple[int, bool]:
    """The context of a model by its config.json, and whether that names a window.

    Raises:
        InvalidValueError: the context is not as long as is wanted.
        ModelNotFoundError: there is no config.json that transformers knows.
    """
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(path_or_id).get_text_config()
    except (OSError, ValueError) as error:
        raise cannot_be_loaded(path_or_id, error) from error
    named = any(value and ("window" in name or "chunk" in name) for name, value in config.to_dict().items())
    return _max_context(config, wanted), named


def _max_context(config: Any, wanted: int | None) -> int:
    """The model's context, up to the position at which rotations would depend on the batch."""
    names = ("max_position_embeddings", "max_target_positions")  # the second in Whisper
    limit = next((int(length) for name in names if (length := getattr(config, name, None) or 0) > 0), _UNLIMITED)
    # Another request's positions would change all rotations of ours.
    if (rescaled := rotation_limit(config)) and rescaled[1] < limit:
        kind, limit = rescaled
        _log.warning("rope type %s: the context is limited to %d tokens", kind, limit)
    if wanted is None and limit == _UNLIMITED:  # as in recurrent models
        _log.warning("the model names no context: it is limited to %d tokens, unless max_context is set", _UNNAMED)
        return _UNNAMED
    if wanted is None:
        return limit
    if not 2 <= wanted <= limit:
        raise InvalidValueError("max_context", wanted, f"it must lie in [2, {limit}] for this model")
    return wanted


def fingerprint(module: Any, tokenizer: Tokenizer) -> str:
    """16 hexadecimal digits of the architecture, a few elements of every weight, and the vocabulary.

    A model that was trained further differs in some weight, also if only an adapter was merged into a few matrices. The
    weights' names do not count, and the vocabulary does instead of the tokenizer's file: both change with libraries.
    Elements count as bfloat16: a checkpoint is one model in all precisions, 8 bits included. What one of them wrote
    makes good drafts for the others, and drafts decide no token.
    """
    digest = hashlib.sha256(type(module).__name__.encode())
    weights = [weight.detach() for weight in module.parameters() if weight.numel()]
    samples = [
        f"{tuple(weight.shape)}".encode() + sample for weight, sample in zip(weights, _samples(weights), strict=True)
    ]
    for sample in sorted(samples):
        digest.update(sample)
    for token, number in sorted(tokenizer.token_ids().items()):
        digest.update(f"{number} {token}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:16]


def _samples(weights: list[torch.Tensor]) -> list[bytes]:
    """A few elements of each weight, evenly spaced, as the bytes of bfloat16."""
    picked = []
    for weight in weights:
        flat = _plain(weight).reshape(-1)
        at = torch.linspace(0, flat.numel() - 1, min(_ELEMENTS, flat.numel()), dtype=torch.float64).long()
        picked.append(flat[at.to(flat.device)].float())
    values = torch.cat([elements.cpu() for elements in picked])
    values[values.abs() < _SMALLEST] = 0.0
    rows = values.to(torch.bfloat16).view(torch.int16).split([elements.numel() for elements in picked])
    return [row.numpy().tobytes() for row in rows]


def _plain(weight: torch.Tensor) -> torch.Tensor:
    """A weight as a tensor whose elements can be picked."""
    if isinstance(weight, DTensor):
        return weight.full_tensor()  # by all ranks alike
    if type(weight) in (torch.Tensor, nn.Parameter):
        return weight.float() if weight.dtype in _FLOAT8 else weight
    return weight.dequantize()  # such as torchao's
