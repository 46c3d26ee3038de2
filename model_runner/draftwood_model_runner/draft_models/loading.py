"""Loads what drafts beside a model, and refuses what does not fit it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from draftwood_model_runner.draft_models.drafting import HeadParts
from draftwood_model_runner.draft_models.heads import EagleHead, Embedding, load_head
from draftwood_model_runner.errors import InvalidValueError
from draftwood_model_runner.loading.gguf import dense_place
from draftwood_model_runner.loading.loaded import DraftModel, LoadedModel
from draftwood_model_runner.loading.sources import KNOWN_MODELS
from draftwood_strategies.built_in import MODEL_STRATEGIES

if TYPE_CHECKING:
    from draftwood_strategies.arrays import Float32Array

_log = logging.getLogger(__name__)

DRAFT_MODEL, HEAD = MODEL_STRATEGIES
AUTO, NO_HEAD = "auto", "none"
_BUNDLED = Path(__file__).parent / "bundled"


def bundled_head(path_or_id: str) -> str | None:
    """The folder of the head that this package has for a model; None if it has none."""
    for known in KNOWN_MODELS.values():
        folder = _BUNDLED / known.name
        is_dense = Path(path_or_id).parts[-2:] == dense_place(Path(), known.gguf_sha256, known.name).parts[-2:]
        if (is_dense or path_or_id == known.hub_id) and folder.is_dir():
            return str(folder)
    return None


def read_head(draft_head: str, path_or_id: str) -> EagleHead | None:
    """The head that a setting names for a model; None for none.

    Args:
        draft_head: a folder; "auto" for the one that this package has for the model, if it has one; or "none".

    Raises:
        InvalidValueError: there is no such head, or it is one of another model.
    """
    folder = bundled_head(path_or_id) if draft_head == AUTO else draft_head
    if folder is None or draft_head == NO_HEAD:
        return None
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(path_or_id).get_text_config()
    return load_head(folder, config.hidden_size, config.num_hidden_layers, config.vocab_size)


def head_drafter(head: EagleHead, path_or_id: str, model: LoadedModel, threads: int | None) -> DraftModel:
    """A head beside a model that was loaded for it.

    Args:
        path_or_id: of the model.

    Raises:
        InvalidValueError: the model's runner shows no hidden states, or the head cannot be computed by it.
    """
    from draftwood_model_runner.runners.openvino.factory import take_over_head

    if model.runner_name != "openvino":
        problem = f"it needs runner openvino, and the model has runner {model.runner_name}"
        raise InvalidValueError("draft_head", head.name_or_path, problem)
    weight = head.fc.weight.detach().numpy().T.copy()

    def combine(features: Float32Array) -> Float32Array:
        combined: Float32Array = features @ weight
        return combined

    factory = take_over_head(head, model.max_context, threads)
    token_ids = head.token_ids.numpy().astype(np.int32)
    parts = HeadParts(combine, Embedding(path_or_id), token_ids)
    return DraftModel(factory, parts, sum(p.numel() for p in head.parameters()))


def model_drafter(draft: LoadedModel, target: LoadedModel, draft_model: str) -> DraftModel:
    """A smaller model beside a target.

    Raises:
        InvalidValueError: it has another vocabulary, is not smaller, or another runner computes it.
    """

    def refused(problem: str) -> InvalidValueError:
        return InvalidValueError("draft_model", draft_model, problem)

    same_size = draft.vocab_size == target.vocab_size
    if not same_size or draft.tokenizer.token_ids() != target.tokenizer.token_ids():
        sizes = f"{draft.vocab_size:,} tokens, and the model {target.vocab_size:,}"
        raise refused(f"it must have the vocabulary of the model: it has {sizes}, or names others")
    if draft.parameters >= target.parameters:
        weights = f"{draft.parameters / 1e6:,.0f} million weights, and the model {target.parameters / 1e6:,.0f}"
        raise refused(f"it must be smaller than the model: it has {weights}")
    if draft.runner_name != target.runner_name:
        raise refused(f"runner {draft.runner_name} computes it, and {target.runner_name} the model; both need the same")
    if draft.max_context < target.max_context:
        raise refused(f"it must have the model's context of {target.max_context:,} tokens, not {draft.max_context:,}")
    return DraftModel(draft.factory, None, draft.parameters)
