"""Loads what drafts beside a model, and refuses what does not fit it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from draftwood_model_runner.errors import (
    InvalidInputError,
    InvalidValueError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from draftwood_model_runner.loading.checkpoint import (
    may_have_mtp,
    name_of,
    require_folder,
    stored_parameters,
    weights_folder,
)
from draftwood_model_runner.loading.loaded import DraftModel, LoadedModel, configured_context
from draftwood_model_runner.loading.sources import AUTO_HEAD, MTP_HEAD, NO_HEAD, bundled_head, require_head
from draftwood_model_runner.loading.tokenizer import load_tokenizer
from draftwood_model_runner.runners.base import HeadParts, RunnerFactory
from draftwood_strategies.arrays import Float32Array, Int32Array

if TYPE_CHECKING:
    from draftwood_model_runner.loading.draft_heads import EagleHead
    from draftwood_model_runner.loading.mtp_heads import MtpHead

_log = logging.getLogger(__name__)

HEAD, DRAFT_MODEL = "head", "draft_model"
"""The names of the strategies."""


def read_head(draft_head: str, path_or_id: str, problem: str) -> EagleHead | MtpHead | None:
    """The head that a setting names for a model; None for none.

    Args:
        draft_head: a folder; "mtp" for the module for multi-token prediction of the model's checkpoint; "auto" for the
            one that this package has for the model, or else this module, if there is one; or "none".
        problem: why no head can be computed beside the model; "" if one can.

    Raises:
        InvalidValueError: there is no such head, it is one of another model, or one is named beside a problem.
        ModelNotFoundError: the model's files are not there.
    """
    require_head(draft_head)
    if draft_head == NO_HEAD:
        return None
    head = draft_head
    if head == AUTO_HEAD:
        head = bundled_head(path_or_id) or _module_of(path_or_id)
    if not head:
        return None
    with left_out_if_unchosen(draft_head):
        if problem:
            allowed = problem if draft_head == AUTO_HEAD else f"it must be {AUTO_HEAD} or {NO_HEAD}: {problem}"
            raise InvalidValueError("draft_head", draft_head, allowed)
        return _loaded_head(head, path_or_id)
    return None


@contextmanager
def left_out_if_unchosen(draft_head: str) -> Iterator[None]:
    """Logs why a head that nobody chose is left out, instead of raising InvalidValueError."""
    try:
        yield
    except InvalidValueError as error:
        if draft_head != AUTO_HEAD:
            raise
        _log.info("the model is served without its draft head: %s", error.allowed)


def _module_of(path_or_id: str) -> str:
    """What names the module of a model's checkpoint; "" if it has none, or its files cannot be read, for which there is
    an error where the model is loaded."""
    try:
        return MTP_HEAD if may_have_mtp(str(weights_folder(path_or_id))) else ""
    except ModelNotFoundError:
        return ""


def _loaded_head(head: str, path_or_id: str) -> EagleHead | MtpHead:
    """The head in a folder, or the module of a model's checkpoint. Raises InvalidValueError."""
    # A start without a head need not import modelling code.
    if head == MTP_HEAD:
        from draftwood_model_runner.loading.mtp_heads import load_mtp_head

        return load_mtp_head(path_or_id)
    from transformers import AutoConfig

    from draftwood_model_runner.loading.draft_heads import load_head

    config: Any = AutoConfig.from_pretrained(path_or_id).get_text_config()
    return load_head(head, config.hidden_size, config.num_hidden_layers, config.vocab_size)


def head_drafter(head: EagleHead | MtpHead, path_or_id: str, model: LoadedModel, threads: int | None) -> DraftModel:
    """A head beside a model that was loaded for it.

    Args:
        path_or_id: of the model.

    Raises:
        InvalidValueError: the head cannot be computed by the model's runner, or the model has no embedding for it.
    """
    name = str(head.name_or_path)
    parameters = sum(weight.numel() for part, weight in head.named_parameters() if part not in head.shared)
    token_ids = head.token_ids.numpy().astype(np.int32)
    try:
        factory, combine, embed = _taken_over(head, path_or_id, model, threads)
    except UnsupportedModelError as error:
        raise InvalidValueError(
            "draft_head", name, f"it must be one that the model's runner computes: {error}"
        ) from error
    return DraftModel(name_of(name), factory, HeadParts(combine, embed, token_ids, head.config.hidden_size), parameters)


def _taken_over(
    head: EagleHead | MtpHead, path_or_id: str, model: LoadedModel, threads: int | None
) -> tuple[RunnerFactory, Callable[[Sequence[Any]], Float32Array], Callable[[Int32Array], Float32Array] | None]:
    """A head as its target's runner computes it, and the first two of `HeadParts`."""
    # Packages that need not be there, and modelling code.
    if model.runner_name == "openvino":
        from draftwood_model_runner.loading.draft_heads import Embedding
        from draftwood_model_runner.runners.openvino import factory as openvino

        return *openvino.take_over_head(head, model.max_context, threads), Embedding(path_or_id)
    target: Any = model.factory
    if model.runner_name == "cuda":
        from draftwood_model_runner.runners.cuda import factory as cuda

        return *cuda.take_over_head(head, target), None
    from draftwood_model_runner.runners.torch import runner as by_torch

    return *by_torch.take_over_head(head, target), None


class _Facts(NamedTuple):
    """What must be alike of a smaller model and its target, by its files or loaded.

    Attributes:
        token_ids: of the tokenizer.
        parameters: weights; 0 if that is not known.
    """

    token_ids: dict[str, int]
    vocab_size: int
    context: int
    parameters: int

    @classmethod
    def by_files(cls, path_or_id: str, max_context: int | None) -> _Facts:
        from transformers import AutoConfig

        require_folder(path_or_id)
        context, _ = configured_context(path_or_id, max_context)
        vocab_size = int(AutoConfig.from_pretrained(path_or_id).get_text_config().vocab_size)
        token_ids = load_tokenizer(path_or_id).token_ids()
        return cls(token_ids, vocab_size, context, stored_parameters(path_or_id))

    @classmethod
    def of(cls, model: LoadedModel) -> _Facts:
        return cls(model.tokenizer.token_ids(), model.vocab_size, model.max_context, model.parameters)


def check_draft_model(draft_model: str, path_or_id: str, max_context: int | None) -> None:
    """Compares a smaller model with its target, before the weights of either are read.

    Args:
        max_context: of the target, as for `load_model`.

    Raises:
        InvalidValueError: there is no such model, it has another vocabulary or a shorter context, or is not smaller.
    """
    with naming_draft_model(draft_model):
        draft = _Facts.by_files(draft_model, None)
    _require_fit(draft_model, draft, _Facts.by_files(path_or_id, max_context))


def model_drafter(draft: LoadedModel, target: LoadedModel, draft_model: str) -> DraftModel:
    """A smaller model beside a target.

    Raises:
        InvalidValueError: it has another vocabulary or a shorter context, is not smaller, or another runner computes
            it.
    """
    _require_fit(draft_model, _Facts.of(draft), _Facts.of(target))
    if draft.runner_name != target.runner_name:
        problem = f"runner {draft.runner_name} computes it, and {target.runner_name} the model; both need the same"
        raise InvalidValueError(DRAFT_MODEL, draft_model, problem)
    return DraftModel(draft.name, draft.factory, None, draft.parameters)


def _require_fit(draft_model: str, draft: _Facts, target: _Facts) -> None:
    """Raises InvalidValueError."""
    problem = ""
    if (draft.vocab_size, draft.token_ids) != (target.vocab_size, target.token_ids):
        sizes = f"{draft.vocab_size:,} tokens, and the model {target.vocab_size:,}"
        problem = f"it must have the vocabulary of the model: it has {sizes}, or names others"
    elif 0 < target.parameters <= draft.parameters:
        weights = f"{draft.parameters / 1e6:,.1f} million weights, and the model {target.parameters / 1e6:,.1f}"
        problem = f"it must be smaller than the model: it has {weights}"
    elif draft.context < target.context:
        problem = f"it must have the model's context of {target.context:,} tokens, not {draft.context:,}"
    if problem:
        raise InvalidValueError(DRAFT_MODEL, draft_model, problem)


@contextmanager
def naming_draft_model(draft_model: str) -> Iterator[None]:
    """Errors of a model that cannot be loaded name the setting."""
    try:
        yield
    except (InvalidValueError, ModelNotFoundError, UnsupportedModelError) as error:
        problem = str(error).removeprefix(f"model {draft_model!r}: ")
        raise InvalidInputError(DRAFT_MODEL, draft_model, problem) from error
