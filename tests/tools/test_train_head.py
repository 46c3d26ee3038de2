"""A head is trained from what the bundled model writes, and then drafts better than one that was not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from draftwood_benchmarks.replay import read_trace
from draftwood_benchmarks.replay_beside_model import ModelReplay
from draftwood_model_runner.loading.draft_heads import WEIGHTS
from draftwood_model_runner.loading.model import BUNDLED_MODEL, load_model
from draftwood_strategies import create
from tools import train_head
from tools.train_head import Recipe, Trainer, _examples, app, new_head, scale_of

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some conversations of the bundled model."""
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_head, "_ROUND", 48)
        arguments = ["texts", "--out", str(file), "--model", BUNDLED_MODEL, "--tokens", "1500"]
        assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    return file


def trained(texts: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(Recipe.__new__, "__defaults__", (1024, 3, 0.5, 0.8, 4, 4, 3e-3, 160, 0.1, 0))
    arguments = ["train", str(texts), "--out", str(folder), "--model", BUNDLED_MODEL, "--epochs", "2", "--threads", "1"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "right at each level" in result.output
    return str(folder)


def test_texts_are_conversations_of_the_model(texts: Path) -> None:
    recordings = [*read_trace(texts)]
    assert sum(output.size for _, output in recordings) >= 1500
    again = [json.loads(line)["prompt_ids"] for line in texts.read_text().splitlines()]
    assert len({tuple(prompt) for prompt in again}) > 0.8 * len(again), "questions differ"


def test_training_is_reproducible_and_drafts_get_better(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [trained(texts, tmp_path / name, monkeypatch) for name in ("first", "second")]
    first, second = (load_file(Path(folder) / WEIGHTS) for folder in folders)
    assert all(torch.equal(first[name], second[name]) for name in first)
    recordings = [*read_trace(texts)][:12]
    lab = ModelReplay(load_model(BUNDLED_MODEL, draft_head=folders[0]), 16)
    with lab.strategies(0.0):
        alone = lab.replay(create("head"), recordings, 16)
        both = lab.replay(create("hybrid"), recordings, 16)
    with lab.strategies(5.0):
        costly = lab.replay(create("head"), recordings, 16)
    assert alone.acceptance_length > 1.3
    assert both.acceptance_length >= alone.acceptance_length
    assert sum(costly.levels) < 0.3 * sum(alone.levels), "levels that cost five steps are not worth it"


def test_the_trainers_levels_are_those_that_the_head_drafts_with(texts: Path) -> None:
    """The loss is computed for all texts at once; the head's own forward pass, entry by entry, gives the same."""
    from transformers import AutoModelForCausalLM

    from draftwood_model_runner.loading.tokenizer import load_tokenizer

    target = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32)
    recordings, recipe = [*read_trace(texts)][:2], Recipe(draft_vocab_size=512, longest=160)
    head = new_head(target, recordings, recipe)
    examples = [*_examples(target, load_tokenizer(BUNDLED_MODEL), head, recordings, recipe)]
    trainer = Trainer(head, target, recipe, scale_of(examples))
    outputs: list[torch.Tensor] = []
    level: Any = trainer._level

    def noted(*args: Any) -> torch.Tensor:
        outputs.append(level(*args))
        return outputs[-1]

    trainer._level = noted  # type: ignore[method-assign, assignment]
    example = examples[0]
    with torch.no_grad():
        trainer.loss([example], recipe.unrolled)
        read = example.features[:, : head.fc.in_features].float()
        embedded, hidden = target.get_input_embeddings()(example.tokens), head.fc(read / trainer._scale)
        at = 20  # drafts behind this entry
        entries = torch.cat([embedded[1 : at + 2], hidden[: at + 1]], dim=-1)
        for number in range(recipe.unrolled):
            output = head(entries[None], torch.arange(entries.shape[0])[None])[0]
            np.testing.assert_allclose(output[-1], outputs[number][0, at], rtol=2e-4, atol=2e-4)
            following = torch.cat([embedded[at + 2 + number], output[-1]])
            entries = torch.cat([entries, following[None]])
