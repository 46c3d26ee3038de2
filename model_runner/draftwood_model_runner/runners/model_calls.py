"""How models of transformers are called: with our attention, the positions of a tree, and for some rows of logits only.

Attention is replaced by name, so no modelling file is touched. A model whose forward takes no positions is given those
of the tree in its position embeddings.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from draftwood_model_runner.errors import UnsupportedModelError
from draftwood_strategies.arrays import Float32Array

Step = TypeVar("Step")

_CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""Since transformers 5.24; before that, and that of models without attention."""
_LENGTHS = frozenset({"cache_length", "past_key_values_length"})
"""How position embeddings name the length of the cache, since transformers 5.24 and before."""
_POSITIONS: ContextVar[torch.Tensor | None] = ContextVar("draftwood_positions", default=None)
"""int64[batch, T] of the step that the model of this thread computes; None outside steps."""


@contextmanager
def setting(variable: ContextVar[Step], step: Step) -> Iterator[None]:
    """While it lasts, the variable has this value."""
    token = variable.set(step)
    try:
        yield
    finally:
        variable.reset(token)


class AttentionHook(Generic[Step]):
    """An attention function by its name, and the step that the model of this thread computes.

    The step is in a context variable, as some models do not hand on extra arguments of their forward. So no modelling
    file is touched.

    Args:
        name: by which transformers knows the function.
        function: takes module, query [1, head, T, key_dim], key [1, kv_head, T, key_dim], value [1, kv_head, T,
            value_dim], a mask, and keywords such as `scaling` and `sliding_window`; returns [1, T, head, value_dim] and
            no weights.
    """

    def __init__(self, name: str, function: Callable[..., tuple[Any, None]]) -> None:
        self._name, self._function = name, function
        self._step: ContextVar[Step] = ContextVar(name)

    def install(self, module: Any) -> None:
        """Lets a model call the function in place of its own attention."""
        from transformers import AttentionInterface  # imports modelling code, which most loading does without

        AttentionInterface.register(self._name, self._function)
        module.set_attn_implementation(self._name)

    def during(self, step: Step) -> AbstractContextManager[None]:
        """While it lasts, `step` is what `get` returns."""
        return setting(self._step, step)

    def get(self) -> Step:
        """The step, within `during`."""
        return self._step.get()


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """The name by which a forward takes transformers' cache, and its output has it; None if it takes none."""
    names = inspect.signature(forward).parameters
    return next((name for name in _CACHE_NAMES if name in names), None)


@cache
def cache_argument_of(model_class: Any) -> str:
    """The name for a model; the usual name if its forward takes whatever it is given."""
    from transformers.masking_utils import create_causal_mask  # imports what most loading does without

    return cache_argument(model_class.forward) or cache_argument(create_causal_mask) or _CACHE_NAMES[0]


@cache
def takes_positions(model_class: Any) -> bool:
    """Whether the forward of a model takes `position_ids`."""
    return "position_ids" in inspect.signature(model_class.forward).parameters


def plain_positions(module: Any, tokens: int, past: int = 0) -> dict[str, torch.Tensor]:
    """The argument `position_ids` as `generate` gives it for `tokens` tokens after `past` others; none where it gives
    none."""
    if not takes_positions(module.__class__):
        return {}
    return {"position_ids": torch.arange(past, past + tokens, device=module.device)[None]}


def positions_of_step(positions: torch.Tensor) -> AbstractContextManager[None]:
    """While it lasts, position embeddings that `follow_positions` found are given these positions, int64[batch, T]."""
    return setting(_POSITIONS, positions)


def follow_positions(module: Any) -> int:
    """Lets the position embeddings of a model whose forward takes no positions, such as BART's decoder, follow those of
    the step, see `positions_of_step`. Outside steps they compute what they did. Returns how many were found."""
    if takes_positions(module.__class__):
        return 0
    embeddings = [part for part in module.modules() if _is_position_embedding(part)]
    for part in embeddings:
        if _given not in part._forward_pre_hooks.values():
            part.register_forward_pre_hook(_given, with_kwargs=True)
            part.register_forward_hook(_in_shape)
    return len(embeddings)


def _is_position_embedding(part: nn.Module) -> bool:
    names = inspect.signature(type(part).forward).parameters
    return not list(part.children()) and "position_ids" in names and not _LENGTHS.isdisjoint(names)


def _given(
    part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    positions = _POSITIONS.get()
    return None if positions is None else (args, {**kwargs, "position_ids": positions.flatten()})


def _in_shape(part: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
    """The embeddings of a batch of several rows, which were looked up as one."""
    positions = _POSITIONS.get()
    if positions is None or positions.shape[0] == 1:
        return None
    return output.reshape(*positions.shape, output.shape[-1])


def layer_list(module: Any) -> nn.ModuleList:
    """The layers of a model, in their order.

    Raises:
        UnsupportedModelError: it has no list of as many as its config names.
    """
    decoder, wanted = module.get_decoder(), int(module.config.get_text_config().num_hidden_layers)
    for part in decoder.modules():
        if isinstance(part, nn.ModuleList) and len(part) == wanted:
            return part
    raise UnsupportedModelError(
        f"{type(module).__name__} has no list of its {wanted} layers, whose inputs a draft head reads"
    )


class LayerInputs:
    """The inputs of some layers in a forward pass, see `noted_features`."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self._layers = layers
        self._parts: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}

    def note(self, layer: int, hidden: torch.Tensor) -> None:
        """The input of a layer, [1, T, d] or [T, 1, d]; several of them where a step has several forward passes."""
        if layer in self._parts:
            self._parts[layer].append(hidden.flatten(0, 1))

    def joined(self, out: torch.Tensor | None = None) -> torch.Tensor | None:
        """[T, f], the inputs of all layers one beside the other; None without layers.

        Args:
            out: [T, f], where they go.
        """
        if not self._layers:
            return None
        inputs = {layer: parts[0] if len(parts) == 1 else torch.cat(parts) for layer, parts in self._parts.items()}
        return torch.cat([inputs[layer] for layer in self._layers], dim=-1, out=out)


_NOTED: ContextVar[LayerInputs | None] = ContextVar("draftwood_layer_inputs", default=None)


def note_layer_input(layer: int, hidden: torch.Tensor) -> None:
    """Tells `noted_features` of a layer that is not called as a module; hidden as for `LayerInputs.note`."""
    if (noted := _NOTED.get()) is not None:
        noted.note(layer, hidden)


@contextmanager
def noted_features(module: Any, layers: tuple[int, ...]) -> Iterator[LayerInputs]:
    """While it lasts, the inputs of these layers are noted, as forward passes come to them.

    Args:
        layers: the number of layers stands for what the output head reads, behind the last norm. Of a `HeadModel`
            `HANDED_ON`.
    """
    noted = LayerInputs(layers)
    hooks = _noting_hooks(module, noted, layers) if layers and not isinstance(module, HeadModel) else []
    try:
        with setting(_NOTED, noted):
            yield noted
    finally:
        for hook in hooks:
            hook.remove()


def _noting_hooks(module: Any, noted: LayerInputs, layers: tuple[int, ...]) -> list[RemovableHandle]:
    def note_input(layer: int, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        noted.note(layer, args[0] if args else kwargs["hidden_states"])

    def note_output(layer: int, part: nn.Module, args: Any, output: Any) -> None:
        noted.note(layer, output[0])

    hooks, of_model = [], layer_list(module)
    for layer in dict.fromkeys(layers):  # a shallow model's may be the same
        if layer < len(of_model):
            hooks.append(of_model[layer].register_forward_pre_hook(partial(note_input, layer), with_kwargs=True))
        else:
            hooks.append(module.get_decoder().register_forward_hook(partial(note_output, layer)))
    return hooks


HANDED_ON: tuple[int, ...] = (0,)
"""What a `HeadModel` notes, see `noted_features`."""


class HeadModel(nn.Module):
    """A draft head, called as a model is by `logits_of_rows`, in the dtype and on the device of its target. It looks
    the embeddings of its tokens up in the target's.

    Hidden states travel by the host: it is given them as `StepBatch.features`, and what it hands on is noted as the
    input of layer 0, [R, d].

    Args:
        head: such as `loading.draft_heads.EagleHead`; its weights change their dtype and device.
        target: a transformers model.

    Attributes:
        hidden_width: d.

    Raises:
        UnsupportedModelError: the target has no embedding of its tokens.
    """

    def __init__(self, head: Any, target: Any) -> None:
        super().__init__()
        embedding = getattr(target.get_input_embeddings(), "weight", None)
        if embedding is None:
            raise UnsupportedModelError(f"{type(target).__name__} has no embedding of its tokens, which a head reads")
        self.dtype, self.device = target.dtype, target.device
        self._embedding = [embedding]  # a list, so that it is no weight of the head
        self.hidden_width = int(head.features - embedding.shape[1])
        if "lm_head.weight" in head.shared:
            head.lm_head = target.get_output_embeddings()  # not held twice
        self.head = head.to(self.device)
        for weight in head.parameters():  # rotations stay in float32
            weight.data = weight.data.to(self.dtype)

    def forward(
        self,
        input_ids: torch.Tensor,
        features: torch.Tensor,
        position_ids: torch.Tensor,
        logits_to_keep: torch.Tensor,
        use_cache: bool = False,
    ) -> Any:
        """An output with `logits`, [1, R, draft vocabulary].

        Args:
            input_ids, position_ids: int64[1, T].
            features: [1, T, d], hidden states.
            logits_to_keep: int64[R], the tokens that need logits.
        """
        from transformers.modeling_outputs import CausalLMOutput  # imports what most loading does without

        embedded = nn.functional.embedding(input_ids, self._embedding[0])
        read = torch.cat([embedded.to(self.dtype), features.to(self.dtype)], dim=-1)
        hidden = self.head(read, position_ids)[0].index_select(0, logits_to_keep)
        note_layer_input(HANDED_ON[0], hidden[None])
        return CausalLMOutput(logits=self.head.logits(hidden)[None])

    @torch.inference_mode()
    def combine(self, features: Sequence[Any]) -> Float32Array:
        """See `HeadParts.combine`; computed on the device."""
        read = torch.cat([torch.as_tensor(piece, dtype=self.dtype, device=self.device) for piece in features])
        first = getattr(self.head, "fc", None)  # a head that reads one layer takes it as it is
        combined: Float32Array = (read if first is None else first(read)).float().cpu().numpy()
        return combined


def logits_of_rows(module: Any, rows: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Logits [R, vocab] of one forward pass.

    A model without the parameter `logits_to_keep`, such as Whisper's decoder, computes the logits of all tokens, of
    which R are taken.

    Args:
        module: a transformers model.
        rows: int64[R], the tokens that need logits.
        inputs: other keyword arguments of its forward; a batch of one.

    Raises:
        RuntimeError: the model gave another number of rows.
    """
    if _selects(module.__class__):
        logits: torch.Tensor = module(**inputs, logits_to_keep=rows).logits[0]
    else:
        logits = module(**inputs).logits[0].index_select(0, rows)
    check_rows(logits.shape, int(rows.shape[0]))
    return logits


def check_rows(shape: tuple[int, ...], wanted: int) -> None:
    """Raises RuntimeError if logits of this shape are not those of `wanted` tokens."""
    if shape[0] != wanted:
        raise RuntimeError(f"the model gave {shape[0]} rows of logits, {wanted} were asked for")


@cache
def _selects(model_class: Any) -> bool:
    """Whether forward has the parameter: many take any keyword and ignore those that they do not know."""
    return "logits_to_keep" in inspect.signature(model_class.forward).parameters
