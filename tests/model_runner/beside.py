"""Targets with models beside them that draft, and strategies that ask these at any cost."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from draftwood_model_runner.engine import Engine, model_strategies
from draftwood_model_runner.loading.draft_heads import WEIGHTS, EagleHead, load_head
from draftwood_model_runner.loading.draft_models import head_drafter
from draftwood_model_runner.loading.loaded import DraftModel, LoadedModel
from draftwood_model_runner.loading.model import BUNDLED_MODEL, load_model
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies import Strategy, create
from tests.draft_models import write_model, write_untrained_head
from tests.model_runner.families import VOCAB, reference, served, taken_over

NAMES = ("draft_model", "head", "hybrid")
"""Strategies that draft by what is beside the bundled model; `hybrid` by both."""


def drafting_for_itself(model: LoadedModel) -> LoadedModel:
    """All that it drafts first for greedy decoding is right."""
    itself = DraftModel("itself", model.factory, None, model.parameters)
    return replace(model, drafters={**model.drafters, "draft_model": itself})


@functools.cache
def served_beside(family: str, runner: str = "torch") -> LoadedModel:
    """As `families.served`, drafting for itself; the bundled model by OpenVINO with an untrained head as well."""
    if (family, runner) != ("bundled", "openvino"):
        return drafting_for_itself(served(family, runner))
    with TemporaryDirectory() as folder:
        head = write_untrained_head(Path(folder) / "head")
        model = load_model(BUNDLED_MODEL, dtype="float32", max_context=512, runner=runner, draft_head=head)
    return drafting_for_itself(model)


def interpret() -> None:
    """Lets the cuda runner compute on a CPU."""
    # Kernels, which few tests of this file need.
    from tests.model_runner.runners.cuda.interpreting import interpret

    interpret()


def head_folder(folder: Path, vocab: int, width: int = 256, drafted: int = 512, **changed: Any) -> str:
    """A head with random weights for the bundled model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=2 * width, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=1, vocab_size=vocab, max_position_embeddings=2048,
    )  # fmt: skip
    vars(config).update({"draft_vocab_size": drafted} | changed)
    head = EagleHead(config)
    head.d2t.copy_(torch.arange(drafted) * 3)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.08) if weight.dim() > 1 else torch.nn.init.ones_(weight)
    folder.mkdir(exist_ok=True)
    config.to_json_file(folder / "config.json")
    save_file({name: tensor.contiguous() for name, tensor in head.state_dict().items()}, folder / WEIGHTS)
    return str(folder)


def runner_options(runner: str) -> dict[str, Any]:
    if runner == "cuda":
        interpret()
    return {"runner": "torch", "exact": True} if runner == "exact" else {"runner": runner}


def with_head(folder: str, runner: str = "openvino", module: Any = None) -> tuple[LoadedModel, EagleHead]:
    """A model, the bundled one if there is none, with the head in a folder, and the head as it was."""
    path = BUNDLED_MODEL if module is None else write_model(Path(folder).parent / "model", module)
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    config = module.config
    head = load_head(folder, config.hidden_size, config.num_hidden_layers, config.vocab_size)
    target = taken_over(module, feature_layers=head.feature_layers_of_target, **runner_options(runner))
    assert target.exact == (runner == "exact")
    drafter = head_drafter(copy.deepcopy(head), path, target, None)
    return replace(target, drafters={"head": drafter}), head


@functools.cache
def llama_with_head() -> LoadedModel:
    """The tiny Llama with a head of random weights, which is right now and then."""
    with TemporaryDirectory() as folder:
        head = head_folder(Path(folder, "head"), VOCAB, 64, 64, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
        return with_head(head, "torch", reference("llama"))[0]


def assert_no_faults(sequences: Iterable[Sequence]) -> None:
    """Drafting went on for all, with all sources of a hybrid."""
    for sequence in sequences:
        assert sequence.stats.drafting_disabled_reason == ""
        assert not getattr(sequence.strategy, "failures", None)


def create_beside(engine: Engine, name: str, **options: Any) -> Strategy:
    """A strategy that may draft by the models of an engine, for which their levels cost nothing from now on."""
    for drafts in engine.model_drafts.values():
        drafts.level_share = lambda rows=None: 0.0  # type: ignore[method-assign]
    with model_strategies(engine):
        return create(name, **options)
