"""What the model writes by itself helps first answers, changes no token, and is kept in a file."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from draftwood_model_runner.engine import Engine, EngineConfig
from draftwood_model_runner.own_text import own_text_successors
from draftwood_model_runner.request import StopParams
from draftwood_strategies import create
from draftwood_strategies.native import Int32Array
from draftwood_strategies.successors import WIDTH, has_layout
from tests.model_runner.families import as_prompt, greedy, reference, served
from tests.model_runner.sequences import make_sequence

TOKENS = 1200
QUESTION = "How do I cancel my order?"
NEW_TOKENS = 80


def made_engine(family: str = "bundled") -> Engine:
    return Engine(served(family), EngineConfig(max_draft_nodes=32, adaptive_budget=False, max_running=16))


def answer(engine: Engine, name: str) -> tuple[list[int], int]:
    """The answer of a tenant without a memory, and in how many steps."""
    prompt = engine.model.tokenizer.encode_chat([{"role": "user", "content": QUESTION}])
    strategy = create(name)
    sequence = make_sequence("q", prompt, StopParams(NEW_TOKENS), strategy=strategy, max_draft_nodes=32)
    engine.add(sequence)
    while engine.has_work:
        engine.step()
    return list(sequence.output), sequence.stats.decode_steps


@functools.cache
def own_text() -> Int32Array:
    engine = made_engine()
    rows = own_text_successors(engine, TOKENS, None)
    engine.check()
    return rows


def test_top_tokens_are_those_of_transformers() -> None:
    engine = made_engine()
    text = as_prompt([(7 * i) % 97 + 5 for i in range(70)])
    with torch.inference_mode():
        logits = reference("bundled")(torch.from_numpy(text.astype(np.int64))[None]).logits[0]
    np.testing.assert_array_equal(engine.top_tokens(text, WIDTH), logits.topk(WIDTH).indices.numpy())
    engine.check()


@pytest.mark.parametrize("name", ["recycling", "hybrid"])
def test_first_answers_take_fewer_steps_and_are_those_of_generate(name: str) -> None:
    engine, rows = made_engine(), own_text()
    cold, steps = answer(engine, name)
    assert has_layout(rows)
    before = rows.copy()
    engine.draft_from(rows)
    begun, fewer = answer(engine, name)
    prompt = tuple(engine.model.tokenizer.encode_chat([{"role": "user", "content": QUESTION}]).tolist())
    assert begun == cold == greedy("bundled", prompt, NEW_TOKENS)
    assert fewer < 0.9 * steps
    np.testing.assert_array_equal(rows, before)


def test_a_file_is_read_again_and_a_damaged_one_is_written_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = made_engine("llama")
    rows = own_text_successors(engine, 300, tmp_path)
    [file] = tmp_path.iterdir()
    steps = engine.counts.steps
    np.testing.assert_array_equal(own_text_successors(engine, 300, tmp_path), rows)
    assert engine.counts.steps == steps
    outside = rows.copy()
    outside[0, 0] = engine.model.vocab_size
    with caplog.at_level(logging.WARNING):
        for damage in (file.read_bytes()[:-100], b"", None):
            if damage is None:
                np.save(file, outside)
            else:
                file.write_bytes(damage)
            np.testing.assert_array_equal(own_text_successors(engine, 300, tmp_path), rows)
            np.testing.assert_array_equal(np.load(file), rows)
    assert sum("is not used" in record.getMessage() for record in caplog.records) == 3
    assert [*tmp_path.iterdir()] == [file]


def test_a_folder_that_cannot_be_written_costs_the_file_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert has_layout(own_text_successors(made_engine("llama"), 100, tmp_path / "file" / "folder"))
    assert "was not kept" in caplog.text
