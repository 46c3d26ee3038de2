"""Modules for multi-token prediction of checkpoints: they draft what they compute, and change no token."""

from __future__ import annotations

import logging
import math
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from draftwood_model_runner.errors import InvalidValueError, ModelNotFoundError
from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL
from draftwood_model_runner.loading.loaded import LoadedModel
from draftwood_model_runner.loading.model import load_model
from draftwood_model_runner.loading.mtp_heads import load_mtp_head
from draftwood_model_runner.request import SamplingParams, StopParams
from draftwood_model_runner.runners.openvino import factory
from tests.model_runner.beside import assert_no_faults, create_beside, interpret
from tests.model_runner.families import generate, written_by
from tests.model_runner.sequences import GREEDY, batch_of, engine_of, run
from tests.model_runner.test_model_drafts import answers, drafted_paths
from tests.mtp_models import CONFIGS, LAYERS, WIDTH, Module, change_config, change_tensors, write_with_module

SERVED = [
    ("glm4_moe", "openvino"),
    ("deepseek_v3", "openvino"),
    ("deepseek_v3", "torch"),
    ("qwen3_next", "torch"),
]
DEPTH, NODES, TOKENS = 4, 24, 30
PROMPTS = [tuple(range(3, 40)), tuple(range(900, 860, -1)), (5, 17, 250, 17, 5, 99, 1000)]


class Written(NamedTuple):
    """A checkpoint."""

    folder: str
    module: Module


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    def write(family: str) -> Written:
        folder = tmp_path_factory.mktemp("models") / family
        return Written(str(folder), write_with_module(folder, family))

    return {family: write(family) for family in CONFIGS}


def loaded(folder: str, **options: Any) -> LoadedModel:
    return load_model(folder, **{"draft_head": "mtp", "runner": "openvino", "threads": 1, **options})


@pytest.mark.parametrize("family", CONFIGS)
def test_a_module_computes_what_its_layer_does(family: str, written: dict[str, Written]) -> None:
    """Three levels of it, each with what the one before handed on."""
    folder, module = written[family]
    head = load_mtp_head(folder)
    assert head.feature_layers_of_target == (LAYERS,)
    text = list(PROMPTS[0])
    hidden, tokens = module.features(text)[:, :-1], text[1:]
    for _ in range(3):
        expected = module.computed(tokens, hidden)
        embedded = module.embedding[tokens][None]
        with torch.no_grad():
            output = head(torch.cat([embedded, hidden], dim=-1), torch.arange(len(tokens))[None])
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(head.logits(output[0]), expected[0] @ module.output.T, rtol=1e-4, atol=1e-4)
        hidden = torch.cat([hidden, expected[:, -1:]], dim=1)
        tokens = [*tokens, int((expected[0, -1] @ module.output.T).argmax())]


@pytest.mark.parametrize(("family", "runner"), [*SERVED, ("glm4_moe", "cuda")])
def test_a_module_drafts_what_it_computes(
    family: str, runner: str, written: dict[str, Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are not rounded here."""
    monkeypatch.setattr(factory, "quantize_weights", lambda model, bits: None)
    folder, module = written[family]
    if runner == "cuda":
        interpret()
    # Steps that are interpreted take long.
    prompts, steps = (PROMPTS[2:], 2) if runner == "cuda" else (PROMPTS, 6)
    for text, paths in drafted_paths(loaded(folder, runner=runner), prompts, steps, DEPTH):
        drafted = [*paths]
        for path in (drafted[0], drafted[len(paths) // 2], drafted[-1]):
            expected = module.path_log_probability(text, [*path])
            assert math.log(paths[path]) == pytest.approx(expected, rel=2e-3, abs=2e-3)


@pytest.mark.parametrize(("family", "runner"), SERVED)
@pytest.mark.parametrize("name", ["head", "hybrid"])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.8, top_p=0.9, seed=3)])
def test_a_module_changes_no_token(
    family: str, runner: str, name: str, sampling: SamplingParams, written: dict[str, Written]
) -> None:
    folder, module = written[family]
    engine, stop = engine_of(loaded(folder, runner=runner), NODES, prefill_chunk=16), StopParams(TOKENS)
    strategy = create_beside(engine, name)
    drafted = batch_of(PROMPTS, stop, sampling, strategy=strategy, max_draft_nodes=NODES)
    run(engine, *drafted)
    assert_no_faults(drafted)
    assert [s.output for s in drafted] == [written_by(module.target, prompt, sampling, stop) for prompt in PROMPTS]
    assert sum(s.stats.draft_tokens for s in drafted) > 0


@pytest.mark.parametrize(("family", "runner"), SERVED)
def test_a_module_that_is_right_is_accepted(family: str, runner: str, tmp_path: Path) -> None:
    module = write_with_module(tmp_path / family, family, right=True)
    engine = engine_of(loaded(str(tmp_path / family), runner=runner), NODES)
    for sequence, prompt in zip(answers(engine, PROMPTS, "head", tokens=TOKENS), PROMPTS, strict=True):
        assert sequence.output == generate(module.target, prompt, TOKENS)
        assert sequence.stats.accepted_tokens > TOKENS // 2
        assert sequence.stats.decode_steps <= 2 + -(-TOKENS // (1 + DEPTH)), "all that it drafts is right"


def test_what_a_module_shares_is_neither_counted_nor_held_twice(written: dict[str, Written]) -> None:
    """GLM's file repeats the model's output head. DeepSeek's has another one here."""
    [facts] = loaded(written["glm4_moe"].folder).draft_models
    assert (facts.strategy, facts.name) == ("head", "mtp")
    [with_output] = loaded(written["deepseek_v3"].folder).draft_models
    assert facts.parameters < 4096 * WIDTH < with_output.parameters
    for family, shared in (("glm4_moe", True), ("deepseek_v3", False), ("qwen3_next", True)):
        model: Any = loaded(written[family].folder, runner="torch")
        head = model.drafters["head"].factory.module.head
        assert (head.lm_head is model.factory.module.get_output_embeddings()) == shared


def test_auto_takes_the_module(written: dict[str, Written], caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    folder = written["glm4_moe"].folder
    assert {*loaded(folder, draft_head="auto").drafters} == {"head"}
    assert loaded(BUNDLED_MODEL, draft_head="auto").drafters == {}
    with caplog.at_level(logging.INFO):
        other = Path(shutil.copytree(folder, tmp_path / "other"))
        change_tensors(other, {"model.mtp.projection.weight": torch.zeros(4, 4)}, without=f"layers.{LAYERS}.")
        assert loaded(str(other), draft_head="auto").drafters == {}
    [line] = [record for record in caplog.records if "draft head" in record.message]
    assert line.message == (
        "the model is served without its draft head: the MTP module of the model has a form that is not known, with a"
        " tensor model.mtp.projection.weight"
    )


@pytest.mark.parametrize(
    ("changed", "without", "config", "problem"),
    [
        ({}, f"layers.{LAYERS}.", {}, "the model must have an MTP module, and its safetensors files name no tensor"),
        ({}, "eh_proj", {}, f"the MTP module of the model must have a tensor model.layers.{LAYERS}.eh_proj.weight"),
        ({}, f"layers.{LAYERS}.mlp.gate", {}, "cannot be computed: missing tensor layers.0.mlp.gate"),
        ({f"model.layers.{LAYERS}.extra.weight": torch.zeros(2)}, "nothing", {}, "unexpected tensor layers.0.extra"),
        ({f"model.layers.{LAYERS}.enorm.weight": torch.zeros(7)}, "nothing", {}, "cannot be computed: "),
        ({}, "nothing", {"quantization_config": {"quant_method": "fp8"}}, "is quantized as its checkpoint is"),
        ({}, "nothing", {"model_type": "llama"}, "cannot be computed: "),
    ],
)
def test_a_module_that_cannot_be_computed_is_refused(
    changed: dict[str, torch.Tensor],
    without: str,
    config: dict[str, Any],
    problem: str,
    written: dict[str, Written],
    tmp_path: Path,
) -> None:
    folder = Path(shutil.copytree(written["glm4_moe"].folder, tmp_path / "changed"))
    change_tensors(folder, changed, without)
    change_config(folder, **config)
    with pytest.raises(InvalidValueError, match=r"^draft_head: 'mtp' is not allowed; ") as refused:
        load_model(str(folder), draft_head="mtp")
    assert problem in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("draft_head", ["auto", "mtp"])
def test_a_file_that_ends_too_early_is_an_error_of_the_model(
    draft_head: str, written: dict[str, Written], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(written["glm4_moe"].folder, tmp_path / "cut"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    with pytest.raises(ModelNotFoundError, match="its weights cannot be loaded"):
        load_model(str(folder), draft_head=draft_head)
