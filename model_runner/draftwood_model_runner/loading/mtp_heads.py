"""The modules for multi-token prediction (MTP) that checkpoints have behind their layers, as draft heads.

A module is one more decoder layer of its model. Its entry i has the embedding of token i + 1 and the hidden state of
token i behind the model's final norm, and predicts token i + 2 by the model's own output head (DeepSeek-V3, arXiv
2412.19437, section 2.2). Further levels of a draft take it again: what it computed, behind its own norm, takes the
place of the hidden state, as in SGLang, in vLLM since its pull request 45895, and in transformers' `MtpModel`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_MAPPING
from transformers.utils.logging import disable_progress_bar

from draftwood_model_runner.errors import InvalidValueError
from draftwood_model_runner.loading.checkpoint import cannot_be_loaded, mtp_tensors, stored_tensors, weights_folder
from draftwood_model_runner.loading.sources import MTP_HEAD
from draftwood_model_runner.runners.base import KVShape
from draftwood_model_runner.runners.trials import attention_calls

_EMBEDDING = "embed_tokens"
"""A copy of the model's: modules share it (section 2.2), so it is not read."""
_OUTPUT = "lm_head"


class _Form(NamedTuple):
    """How a kind of checkpoint names the tensors of its module.

    Attributes:
        prefix: of all of them, behind a prefix of the model's; `{layers}` is the number of the model's layers.
        renamed: names of parts here, for the names of the checkpoint.
        layer: what the names of the decoder layer's tensors begin with.
    """

    prefix: str
    renamed: Mapping[str, str]
    layer: str


_FORMS = (
    # DeepSeek V3 and those that took it over, such as GLM 4.5
    _Form(
        "layers.{layers}.",
        {
            "enorm": "embedding_norm",
            "hnorm": "hidden_norm",
            "eh_proj": "projection",
            "shared_head.norm": "decoder.norm",
            "shared_head.head": "lm_head",
            "embed_tokens": _EMBEDDING,
        },
        "",
    ),
    # Qwen3-Next, Qwen3.5 and later
    _Form(
        "mtp.",
        {
            "pre_fc_norm_embedding": "embedding_norm",
            "pre_fc_norm_hidden": "hidden_norm",
            "fc": "projection",
            "norm": "decoder.norm",
        },
        "layers.0.",
    ),
)
_PARTS = ("embedding_norm", "hidden_norm", "projection")
"""What a module has before its decoder layer."""


class MtpHead(nn.Module):
    """A module of a checkpoint, with the interface of `loading.draft_heads.EagleHead`.

    Args:
        decoder: the model's class of transformers without its output head, with the module's layer alone and the norm
            that is behind it.
        output: [vocab, d], of the output head.

    Attributes:
        fc: what it makes of the target's features: takes them as they are.
        features: numbers that it reads of each token: an embedding and a hidden state.
        feature_layers_of_target: see `loading.loaded.adopt`.
        shared: names of parameters that are the target's, or stand for its.
    """

    fc = None
    name_or_path = MTP_HEAD
    feature_layers_of_target: tuple[int, ...] = ()
    shared: frozenset[str] = frozenset()

    def __init__(self, decoder: Any, output: torch.Tensor) -> None:
        super().__init__()
        self.config = decoder.config
        width = int(self.config.hidden_size)
        norm = type(decoder.norm)
        self.features = 2 * width
        self.embedding_norm = norm(width, eps=self.config.rms_norm_eps)
        self.hidden_norm = norm(width, eps=self.config.rms_norm_eps)
        self.projection = nn.Linear(2 * width, width, bias=False)
        self.decoder = decoder
        self.lm_head = nn.Linear(width, output.shape[0], bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(output, requires_grad=False)
        self.vocab_size = int(output.shape[0])
        self.kv_shapes = _kv_shapes(decoder)

    @property
    def token_ids(self) -> torch.Tensor:
        """int64[vocab], of each of its tokens that of the target."""
        return torch.arange(self.vocab_size)

    def forward(self, features: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """[B, T, d], what `logits` reads, and the hidden state that the next token is drafted from.

        Args:
            features: [B, T, 2d], embeddings and hidden states: the target's, or its own outputs.
            position_ids: int64[B, T].
        """
        embedded, hidden = features.chunk(2, dim=-1)
        joined = torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], dim=-1)
        inputs = self.projection(joined)
        output = self.decoder(inputs_embeds=inputs, position_ids=position_ids, use_cache=False)
        last: torch.Tensor = output.last_hidden_state
        return last

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, vocab] of [R, d]."""
        logits: torch.Tensor = self.lm_head(hidden)
        return logits

    # How runners let a model of transformers call their attention, and experts that they can compute.

    def set_attn_implementation(self, name: str) -> None:
        self.decoder.set_attn_implementation(name)

    def _can_set_experts_implementation(self) -> bool:
        return bool(self.decoder._can_set_experts_implementation())

    def set_experts_implementation(self, name: str) -> None:
        self.decoder.set_experts_implementation(name)


def _kv_shapes(decoder: Any) -> tuple[KVShape, ...]:
    """What its layer calls attention with. Raises ValueError if that is more than a scale."""
    before = decoder.config._attn_implementation
    calls = attention_calls(decoder, int(decoder.config.max_position_embeddings))
    decoder.set_attn_implementation(before)
    if odd := {option for call in calls for option in call.options} - {"scaling"}:
        raise ValueError(f"its attention has {', '.join(sorted(odd))}")
    return tuple(call.shape for call in calls)


def load_mtp_head(path_or_id: str) -> MtpHead:
    """The module of a model's checkpoint, in float32.

    Args:
        path_or_id: of the model.

    Raises:
        InvalidValueError: there is none, its form is not known, or it cannot be computed; names the setting
            `draft_head`.
        ModelNotFoundError: the model's files are not there, or cannot be read.
    """
    try:
        files = stored_tensors(weights_folder(path_or_id))
    except SafetensorError as error:  # as of a file that was not copied to its end
        raise cannot_be_loaded(path_or_id, error, "weights") from error
    whole: Any = AutoConfig.from_pretrained(path_or_id)
    config = whole.get_text_config()
    own, target = _module_and_output(whole, files)
    repeated = own.pop(f"{_OUTPUT}.weight", None)
    try:
        stored = {ours: _read(files, name) for ours, name in own.items()}
        output, shared = _read(files, target), True
        if repeated is not None and not torch.equal(output, another := _read(files, repeated)):
            output, shared = another, False
        head = _built(config, stored, output)
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise _refused(f"the MTP module of the model cannot be computed: {reason}") from error
    head.feature_layers_of_target = (int(config.num_hidden_layers),)
    head.shared = frozenset({f"decoder.{_EMBEDDING}.weight"} | ({f"{_OUTPUT}.weight"} if shared else set()))
    return head


def _refused(problem: str) -> InvalidValueError:
    return InvalidValueError("draft_head", MTP_HEAD, problem)


def _module_and_output(whole: Any, files: Mapping[str, Path]) -> tuple[dict[str, str], str]:
    """The module's tensors in a checkpoint, as `_named_here`, and that of the model's output head.

    Args:
        whole: config of the checkpoint.

    Raises:
        InvalidValueError: there are none, or in another form.
    """
    config = whole.get_text_config()
    if (found := _form_of(files, int(config.num_hidden_layers))) is None:
        if named := mtp_tensors(files):
            raise _refused(f"the MTP module of the model has a form that is not known, with a tensor {named[0]}")
        raise _refused("the model must have an MTP module, and its safetensors files name no tensor of one")
    if getattr(whole, "quantization_config", None) or getattr(config, "quantization_config", None):
        raise _refused("the MTP module of the model is quantized as its checkpoint is, which is not supported")
    form, prefix = found
    own = _named_here(form, prefix, files)
    own.pop(f"{_EMBEDDING}.weight", None)
    lacking = [stored for stored, ours in form.renamed.items() if ours in _PARTS and f"{ours}.weight" not in own]
    if lacking:
        raise _refused(f"the MTP module of the model must have a tensor {prefix}{lacking[0]}.weight")
    # The second is the output head of a model that has tied it to its embeddings.
    output = _of_target(files, prefix, f"{_OUTPUT}.weight") or _of_target(files, prefix, f"{_EMBEDDING}.weight")
    if output is None:
        raise _refused(f"the model's safetensors files must have a tensor {_EMBEDDING}.weight for its MTP module")
    return own, output


def _form_of(files: Mapping[str, Path], layers: int) -> tuple[_Form, str] | None:
    """The form of the module among the tensors of a checkpoint, and the prefix of its names."""
    for form in _FORMS:
        prefix = form.prefix.format(layers=layers)
        mark = f"{prefix}{next(iter(form.renamed))}.weight"
        for name in files:
            if name == mark or name.endswith(f".{mark}"):
                return form, name.removesuffix(mark) + prefix
    return None


def _named_here(form: _Form, prefix: str, files: Mapping[str, Path]) -> dict[str, str]:
    """The module's tensors by their names here; those of its decoder layer begin with `decoder.layers.0.`."""
    named = {}
    for name in files:
        if not name.startswith(prefix):
            continue
        part, _, kind = name.removeprefix(prefix).rpartition(".")
        ours = form.renamed.get(part) or f"decoder.layers.0.{part.removeprefix(form.layer)}"
        named[f"{ours}.{kind}"] = name
    return named


def _of_target(files: Mapping[str, Path], prefix: str, ending: str) -> str | None:
    """A tensor of the model itself, by the end of its name."""
    return next((name for name in files if name.endswith(ending) and not name.startswith(prefix)), None)


def _read(files: Mapping[str, Path], name: str) -> torch.Tensor:
    with safe_open(files[name], framework="pt") as opened:
        tensor: torch.Tensor = opened.get_tensor(name).float()
        return tensor


def _built(config: Any, stored: Mapping[str, torch.Tensor], output: torch.Tensor) -> MtpHead:
    """A module. Raises whatever transformers does for weights that do not fit, or ValueError.

    Args:
        config: of the model.
        stored: its tensors, by their names here.
        output: [vocab, d].
    """
    disable_progress_bar()
    alone, behind = _one_layer(config), "decoder."
    weights = {name.removeprefix(behind): tensor for name, tensor in stored.items() if name.startswith(behind)}
    weights["embed_tokens.weight"] = torch.zeros(1, alone.hidden_size)
    classes: Any = MODEL_MAPPING[type(alone)]
    model_class = classes[0] if isinstance(classes, tuple) else classes
    # transformers' own loader joins experts where it keeps them as one tensor.
    decoder, told = model_class.from_pretrained(
        None, config=alone, state_dict=weights, dtype=torch.float32, output_loading_info=True
    )
    for kind in ("missing", "unexpected", "mismatched"):
        if names := sorted(map(str, told[f"{kind}_keys"])):
            raise ValueError(f"{kind} tensor {names[0]}, {len(names)} in all")
    head = MtpHead(decoder, output)
    for name in _PARTS:
        getattr(head, name).load_state_dict({"weight": stored[f"{name}.weight"]})
    return head.float().eval()


def _one_layer(config: Any) -> Any:
    """The config of a model that has the layer of the module alone, and embeds no tokens."""
    alone = copy.deepcopy(config)
    alone.num_hidden_layers, alone.vocab_size, alone.pad_token_id = 1, 1, None
    if getattr(alone, "layer_types", None):
        alone.layer_types = ["full_attention"]
    if getattr(alone, "mlp_layer_types", None):
        alone.mlp_layer_types = alone.mlp_layer_types[-1:]
    if hasattr(alone, "first_k_dense_replace"):
        alone.first_k_dense_replace = 0
    return alone
