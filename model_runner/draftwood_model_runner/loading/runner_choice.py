"""Chooses what computes a model: kernels of our own on GPUs, OpenVINO on CPUs, torch where these cannot."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import torch

from draftwood_model_runner.engine_config import check_runner, check_weights
from draftwood_model_runner.errors import InvalidValueError, UnsupportedRunnerError
from draftwood_model_runner.runners.base import RunnerFactory
from draftwood_model_runner.runners.probing import try_beyond_thresholds
from draftwood_model_runner.runners.shrinking import CONTEXT

_log = logging.getLogger(__name__)


def choose_runner(
    module: Any,
    runner: str,
    exact: bool | None,
    max_context: int,
    weights: str = "as-is",
    threads: int | None = None,
) -> tuple[RunnerFactory, str]:
    """The model as a runner computes it, and why by this runner.

    Args:
        module: an unmodified transformers model. The torch and cuda runners take it over, see `runners.torch.probe`;
            the openvino runner leaves it as it was.
        runner, exact, weights, threads: as for `loading.model.load_model`.

    Raises:
        InvalidValueError: there is no such runner, it has no exact mode, or no runner has such weights for this model.
        UnsupportedRunnerError: OpenVINO or CUDA is chosen by name and cannot compute the model.
        UnsupportedModelError: draft trees cannot be verified on the model; gives the reason.
    """
    check_runner(runner, exact)
    check_weights(weights, runner, exact)
    if weights != "as-is":
        return _quantized(module, max_context, threads, weights), f"weights are {weights}"
    if runner == "torch":
        return _torch(module, exact, max_context), "chosen by name"
    if runner == "openvino":
        return _openvino(module, bool(exact), max_context, threads), "chosen by name"
    if runner == "cuda":
        return _cuda(module, max_context, bool(exact)), "chosen by name"
    on_gpu = module.device.type == "cuda"
    try:
        if on_gpu:
            factory, reason = _cuda(module, max_context, bool(exact)), f"the model is on {module.device}"
        else:
            factory, reason = _openvino(module, bool(exact), max_context, threads), "the model is on a CPU"
    except UnsupportedRunnerError as error:
        factory, reason = _torch(module, exact, max_context), str(error)
    _log.log(
        logging.WARNING if on_gpu and factory.name != "cuda" else logging.INFO, "runner %s: %s", factory.name, reason
    )
    return factory, reason


def _cuda(module: Any, max_context: int, exact: bool) -> RunnerFactory:
    from draftwood_model_runner.runners.cuda.device.launching import require_triton

    require_triton(module.device)
    # Kernels, which Triton must have been made ready for.
    from draftwood_model_runner.runners.cuda.factory import take_over

    return take_over(module, max_context, exact)


def _torch(module: Any, exact: bool | None, max_context: int) -> RunnerFactory:
    # Imports the modelling code of transformers, which a model in the cache does without.
    from draftwood_model_runner.runners.torch.probe import probe
    from draftwood_model_runner.runners.torch.runner import TorchRunnerFactory

    layout = probe(module, module.dtype != torch.float32 if exact is None else exact, max_context)
    return TorchRunnerFactory(module, layout)


def _quantized(module: Any, max_context: int, threads: int | None, weights: str) -> RunnerFactory:
    try:
        return _openvino(module, False, max_context, threads, weights)
    except UnsupportedRunnerError as error:
        raise InvalidValueError("weights", weights, f"it must be as-is for this model; {error}") from error


def _openvino(module: Any, exact: bool, max_context: int, threads: int | None, weights: str = "as-is") -> RunnerFactory:
    if module.device.type != "cpu":
        raise UnsupportedRunnerError(f"OpenVINO: runs on CPUs only, the model is on {module.device}")
    if exact:
        raise UnsupportedRunnerError("OpenVINO: has no exact mode")
    if find_spec("openvino") is None:
        raise UnsupportedRunnerError("OpenVINO: the package openvino is not installed")
    # A package that need not be there, and takes half a second to import.
    from draftwood_model_runner.runners.openvino.factory import take_over

    factory = take_over(module, max_context, weights=weights, threads=threads)
    try_beyond_thresholds(module, max_context, lambda copied: take_over(copied, CONTEXT))
    return factory
