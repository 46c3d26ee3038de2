"""Models that draft beside another: which are refused, when, and by which words; and a trial of the others."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from draftwood_model_runner.engine import LEAST_AGREED, Engine, EngineConfig, model_strategies, try_drafters
from draftwood_model_runner.engine_config import no_head_reason
from draftwood_model_runner.errors import InvalidValueError, UnsupportedModelError
from draftwood_model_runner.loading import draft_models as draft_loading
from draftwood_model_runner.loading import loaded, sources
from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL
from draftwood_model_runner.loading.draft_models import read_head
from draftwood_model_runner.loading.gguf import dense_place
from draftwood_model_runner.loading.model import load_model
from draftwood_model_runner.loading.sources import KNOWN_MODELS, bundled_head
from draftwood_model_runner.request import StopParams
from draftwood_strategies import create, strategy_names
from tests.draft_models import (
    permuting_model,
    write_fewer_layers,
    write_knowing_head,
    write_model,
    write_untrained_head,
)
from tests.model_runner.families import generate, taken_over
from tests.model_runner.sequences import batch_of, run


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where the weights of a model are read."""

    def read(*args: Any, **options: Any) -> None:
        pytest.fail("weights were read")

    monkeypatch.setattr("draftwood_model_runner.loading.model.load_module", read)


def refusal(**options: Any) -> str:
    with pytest.raises(InvalidValueError) as caught:
        load_model(**options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.usefixtures("no_weights")
def test_a_model_that_does_not_fit_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    larger = write_fewer_layers(tmp_path / "larger", 6)
    short = write_fewer_layers(tmp_path / "short", 2, max_position_embeddings=1024)
    other = write_fewer_layers(tmp_path / "other", 2)
    tokenizer = Path(other, "tokenizer.json")
    content = json.loads(tokenizer.read_text())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 4096, "content": "<another>"})
    tokenizer.write_text(json.dumps(content))
    for options, problem in (
        ({"draft_model": larger}, "it must be smaller than the model: it has 5.9 million"),
        ({"draft_model": short}, "it must have the model's context of 2,048 tokens, not 1,024"),
        (
            {"draft_model": other},
            "it must have the vocabulary of the model: it has 4,096 tokens, and",
        ),
        ({"draft_model": larger, "tensor_parallel": 2}, "it must be unset, since tensor_parallel is 2"),
    ):
        assert refusal(**options).startswith(f"draft_model: '{options['draft_model']}' is not allowed; {problem}")
    assert refusal(draft_model="/no/such") == (
        "draft_model /no/such: no such folder; give a folder or a hub id such as org/name"
    )


@pytest.mark.usefixtures("no_weights")
def test_a_head_that_does_not_fit_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    head = write_untrained_head(tmp_path / "head")
    wide = write_untrained_head(tmp_path / "wide", width=128)
    large = write_untrained_head(tmp_path / "large", draft_vocab_size=6000)
    deep = write_untrained_head(tmp_path / "deep", eagle_aux_hidden_state_layer_ids=[2, 9, 12])
    for options, problem in (
        ({"draft_head": wide}, "it must be a head for this model: that is 256 wide, and this head is for 128"),
        ({"draft_head": large}, "its weights do not fit its config.json"),
        ({"draft_head": deep}, "it reads layers (2, 9, 12), and the model has 6"),
        (
            {"draft_head": str(tmp_path)},
            "it must be auto, mtp, none or a folder with config.json and model.safetensors",
        ),
        ({"draft_head": head, "tensor_parallel": 2}, "tensor_parallel is 2, and a draft head needs 1"),
    ):
        text = refusal(**options)
        assert text.startswith(f"draft_head: '{options['draft_head']}' is not allowed; ")
        assert problem in text


def bundle(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes an untrained head the one that the package has for the bundled model."""
    write_untrained_head(folder / "smollm2-135m")
    monkeypatch.setattr(sources, "_HEADS", folder)
    monkeypatch.setattr(draft_loading, "bundled_head", lambda model: str(folder / "smollm2-135m"))


def test_the_head_of_the_package_is_one_of_a_known_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle(tmp_path, monkeypatch)
    known = KNOWN_MODELS["smollm2-135m"]
    dense = dense_place(tmp_path, known.gguf_sha256, known.name)
    for name in (known.name, known.hub_id, str(dense)):
        assert bundled_head(name) == str(tmp_path / "smollm2-135m")
    for name in (BUNDLED_MODEL, "org/smollm2-135m", str(tmp_path / "smollm2-135m")):
        assert bundled_head(name) is None


def test_a_head_that_nobody_chose_keeps_no_model_from_being_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bundle(tmp_path, monkeypatch)
    with caplog.at_level(logging.INFO):
        assert read_head("auto", BUNDLED_MODEL, no_head_reason(tensor_parallel=2)) is None
    assert "served without its draft head: tensor_parallel is 2, and a draft head needs 1" in caplog.text


def test_a_model_that_shows_no_layers_has_no_head() -> None:
    """And its other refusals say why it has none."""
    module = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL)
    module.config.num_hidden_layers = 5
    with pytest.raises(UnsupportedModelError, match="has no list of its 5 layers, whose inputs a draft head reads"):
        taken_over(module, runner="torch", feature_layers=(2,))


@pytest.mark.parametrize("exact", [None, True])
def test_a_model_and_its_head_are_loaded_by_torch_without_openvino(
    exact: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded, "find_spec", lambda name: None)
    folder, head = write_model(tmp_path / "model", permuting_model()), write_knowing_head(tmp_path / "head")
    model = load_model(folder, draft_head=head, threads=1, exact=exact)
    assert (model.runner_name, model.exact) == ("torch", exact is True)
    assert [(facts.strategy, facts.parameters) for facts in model.draft_models] == [("head", 49_408)]
    engine = Engine(model, EngineConfig(max_running=2, max_draft_nodes=6, adaptive_budget=False))
    with model_strategies(engine):
        [sequence] = batch_of([(1, 2, 3)], StopParams(5), strategy=create("head", depth=2), max_draft_nodes=6)
    run(engine, sequence)
    assert sequence.output == generate(permuting_model(), (1, 2, 3), 5)
    assert sequence.stats.accepted_tokens >= 2


@pytest.mark.system
def test_the_trial_tells_a_model_that_drafts_from_one_that_was_not_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a second start converts nothing."""
    options: dict[str, Any] = {
        "draft_model": write_fewer_layers(tmp_path / "two-layers", 2),
        "draft_head": write_untrained_head(tmp_path / "untrained"),
        "threads": 1,
        "cache": tmp_path / "cache",
    }
    converted = load_model(**options)
    monkeypatch.setattr("draftwood_model_runner.loading.model.load_module", lambda *args: pytest.fail("not kept"))
    for model in (converted, load_model(**options)):
        known = {facts.strategy: (facts.name, facts.parameters) for facts in model.draft_models}
        assert known == {"head": ("untrained", 1_180_672), "draft_model": ("two-layers", 2_655_488)}
        engine = Engine(model, EngineConfig(max_running=2))
        shares = try_drafters(engine)
        assert 0.0 <= shares["head"] < 0.5 * LEAST_AGREED
        assert shares["draft_model"] > 2 * LEAST_AGREED
        engine.check()
        with model_strategies(engine):
            assert {"head", "draft_model"} <= {*strategy_names()}
        assert not {"head", "draft_model"} & {*strategy_names()}
        engine.close()


@pytest.mark.system
def test_the_trial_has_room_in_a_short_context(tmp_path: Path) -> None:
    draft_model = write_fewer_layers(tmp_path / "draft", 2)
    engine = Engine(load_model(draft_model=draft_model, max_context=24, threads=1), EngineConfig(max_running=1))
    assert 0.3 < try_drafters(engine)["draft_model"] <= 1.0
    engine.check()
    engine.close()
