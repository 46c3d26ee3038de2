"""Converts a transformers model to OpenVINO, with paged attention under a tree mask in place of its own attention.

transformers calls `_traced_attention` in place of the attention of a model. It emits one operator of our own, and the
conversion puts OpenVINO's PagedAttention there: the kernel of vLLM (Kwon et al., 2023, arXiv 2309.06180) with
`qq_bias`, a mask among the tokens of the step. The batch has the shape [T, 1], which OpenVINO fuses into faster kernels
than [1, T]: 0.7 against 1.4 ms for a step of one token of the bundled model on two cores.

The front end of OpenVINO is called directly: `openvino.convert_model` sends telemetry.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openvino as ov
import torch
from openvino.frontend import FrontEndManager
from openvino.frontend.pytorch import ConversionExtension
from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder
from torch.overrides import TorchFunctionMode
from transformers.utils import logging as transformers_logging

from draftwood_model_runner.errors import UnsupportedModelError, UnsupportedRunnerError
from draftwood_model_runner.runners.model_calls import (
    AttentionHook,
    follow_positions,
    noted_features,
    positions_of_step,
)
from draftwood_model_runner.runners.openvino.graph import (
    OPERATOR,
    ConvertedModel,
    add_parameters,
    convert_attention,
    join_products,
)
from draftwood_model_runner.runners.openvino.pages import PageLayout
from draftwood_model_runner.runners.trials import attention_calls, unsupported_layers

_EXPERTS = "batched_mm"
"""The implementation of mixtures of experts that can be traced."""
_EXAMPLE_TOKENS = 7

torch.library.define(
    OPERATOR,
    "(Tensor query, Tensor key, Tensor value, float scale, int heads, int key_dim, int kv_heads, int value_dim,"
    " int window) -> Tensor",
)


@torch.library.impl(OPERATOR, "CompositeExplicitAutograd")
def _shape_of_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    heads: int,
    key_dim: int,
    kv_heads: int,
    value_dim: int,
    window: int,
) -> torch.Tensor:
    """Zeros [T, 1, head, value_dim]: while tracing only the shape matters."""
    return query.new_zeros(query.shape[0], query.shape[2], heads, value_dim)


def _traced_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it, see `runners.torch.attention.tree_attention`; [T, 1, head, value_dim]."""
    heads, key_dim, kv_heads, value_dim = (
        int(size) for size in (query.shape[1], query.shape[3], key.shape[1], value.shape[3])
    )
    if heads % kv_heads:  # the kernel would divide by zero
        raise ValueError(f"{heads} heads cannot share {kv_heads} heads of keys and values")
    window = 0 if sliding_window is None or sliding_window >= _TRACE.get() else sliding_window
    scale = key_dim**-0.5 if scaling is None else float(scaling)
    attend = torch.ops.draftwood.paged_attention
    return attend(query, key, value, scale, heads, key_dim, kv_heads, value_dim, window), None


_TRACE = AttentionHook[int]("draftwood_openvino", _traced_attention)
"""Its step is how many positions the model will be run on at most."""


class _FlatModel(torch.nn.Module):
    """The model over a flat batch: input_ids int64[T, 1], position_ids int64[T, 1], logit_rows int64[R]; logits
    [R, vocab], and features [T, f] if there are any. Hidden states are gathered before the output embedding."""

    def __init__(self, module: Any, max_context: int, feature_layers: tuple[int, ...]) -> None:
        super().__init__()
        self.module = module
        self._max_context, self._feature_layers = max_context, feature_layers

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, logit_rows: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        def gather(_: torch.nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            return (args[0].index_select(0, logit_rows),)

        hook = self.module.get_output_embeddings().register_forward_pre_hook(gather)
        try:
            with (
                _TRACE.during(self._max_context),
                positions_of_step(position_ids),
                noted_features(self.module, self._feature_layers) as noted,
            ):
                output = self.module(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        finally:
            hook.remove()
        logits: torch.Tensor = output.logits.flatten(0, 1)
        features = noted.joined()
        return logits if features is None else (logits, features)


def convert(module: Any, max_context: int, feature_layers: tuple[int, ...] = ()) -> ConvertedModel:
    """The model for OpenVINO; `module` is left as it was.

    Weights are float32. They share memory with a float32 `module`, except those of products that were joined.

    Args:
        max_context: positions that the model will be run on at most.
        feature_layers: as in `ConvertedModel`.

    Raises:
        UnsupportedRunnerError: with the reason.
    """
    name, config = type(module).__name__, module.config.get_text_config()
    if reason := unsupported_layers(config, max_context):
        raise UnsupportedRunnerError(f"OpenVINO: {name}: {reason}")
    follow_positions(module)
    try:
        with _as_traced(module):
            calls = attention_calls(module, max_context)
            for option, what in (("softcap", "soft-capping"), ("s_aux", "sinks")):
                if any(option in call.options for call in calls):
                    raise UnsupportedRunnerError(f"attention with {what} is not supported")
            _TRACE.install(module)
            model = _to_openvino(_FlatModel(module, max_context, feature_layers))
    except UnsupportedRunnerError as error:
        raise UnsupportedRunnerError(f"OpenVINO: {name}: {error}") from error
    except UnsupportedModelError as error:
        raise UnsupportedRunnerError(f"OpenVINO: {error}") from error
    except Exception as error:
        reason = f"the model cannot be converted: {type(error).__name__}: {_first_line(error)}"
        raise UnsupportedRunnerError(f"OpenVINO: {name}: {reason}") from error
    join_products(model)
    add_parameters(model)
    layout = PageLayout(tuple(call.shape for call in calls), str(module.dtype).removeprefix("torch."))
    narrow = [
        call.options["sliding_window"]
        for call in calls
        if call.options.get("sliding_window", max_context) < max_context
    ]
    everywhere = len(narrow) == len(calls) and len({*narrow}) == 1
    return ConvertedModel(model, layout, min(narrow, default=None), everywhere, feature_layers)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")


@contextmanager
def _as_traced(module: Any) -> Iterator[None]:
    """The module in float32, with experts that can be traced; afterwards as it was, its attention too.

    transformers keeps these choices in the config, which other models may share.
    """
    configs = {id(part.config): part.config for part in module.modules() if hasattr(part, "config")}
    saved = [(config, dict(vars(config))) for config in configs.values()]
    tensors = [t for t in (*module.parameters(), *module.buffers()) if t.dtype in (torch.bfloat16, torch.float16)]
    weights = [(tensor, tensor.data) for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.float()
        if module._can_set_experts_implementation():
            module.set_experts_implementation(_EXPERTS)
        yield
    finally:
        for config, fields in saved:
            vars(config).clear()
            vars(config).update(fields)
        for tensor, data in weights:
            tensor.data = data


@contextmanager
def _only_errors_logged() -> Iterator[None]:
    """Keeps transformers from warning of properties of a model, such as its loss, that only tracing looks at."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


class _NoListsOfTensors(TorchFunctionMode):
    """Raises where a model reads values of a tensor: a trace would keep those of the example. JetMoE splits its tokens
    among experts so; a step of its converted model wrote outside its memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.tolist:
            raise UnsupportedRunnerError("what it computes depends on values of tensors, which cannot be traced")
        return func(*args, **(kwargs or {}))


class _FlatHead(torch.nn.Module):
    """A draft head over a flat batch: features float32[T, 1, f], position_ids int64[T, 1], logit_rows int64[R]; logits
    [R, vocab] and what these tokens hand on to the next ones, [R, d]."""

    def __init__(self, head: Any, max_context: int) -> None:
        super().__init__()
        self.head = head
        self._max_context = max_context

    def forward(
        self, features: torch.Tensor, position_ids: torch.Tensor, logit_rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with _TRACE.during(self._max_context):
            hidden = self.head(features, position_ids).flatten(0, 1).index_select(0, logit_rows)
        return self.head.logits(hidden), hidden


def convert_head(head: Any, max_context: int) -> ConvertedModel:
    """A draft head for OpenVINO, see `loading.draft_heads.EagleHead` and `loading.mtp_heads.MtpHead`; as `convert`."""
    try:
        with _as_traced(head):
            _TRACE.install(head)
            model = _to_openvino(_FlatHead(head, max_context), head.features)
    except Exception as error:
        raise UnsupportedRunnerError(f"OpenVINO: the draft head cannot be converted: {_first_line(error)}") from error
    join_products(model)
    add_parameters(model)
    layout = PageLayout(head.kv_shapes, "float32")
    return ConvertedModel(model, layout, None, False)


def _to_openvino(model: torch.nn.Module, features: int = 0) -> ov.Model:
    """Converts a model over a flat batch.

    Args:
        features: that it reads of each token; 0 for one that reads its id.
    """
    ids, rows = torch.arange(_EXAMPLE_TOKENS), torch.arange(_EXAMPLE_TOKENS - 2)
    read = torch.ones(_EXAMPLE_TOKENS, 1, features) if features else torch.ones_like(ids)[:, None]
    example = (read, ids[:, None], rows)
    with warnings.catch_warnings(), _only_errors_logged(), torch.no_grad():
        warnings.simplefilter("ignore")  # sizes of tensors that become constants: all but T are
        with _NoListsOfTensors():
            traced = torch.jit.trace(model, example, strict=False, check_trace=False)
        decoder = TorchScriptPythonDecoder(traced, example_input=example)
        front_end = FrontEndManager().load_by_framework("pytorch")
        front_end.add_extension(ConversionExtension(OPERATOR, convert_attention))
        converted: ov.Model = front_end.convert(front_end.load(decoder))
    shapes = {"features": [-1, 1, features]} if features else {"input_ids": [-1, 1]}
    converted.reshape({name: ov.PartialShape(shape) for name, shape in (shapes | {"position_ids": [-1, 1]}).items()})
    return converted
