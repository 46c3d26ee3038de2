"""What the model writes by itself helps first answers and changes no token, gives way to requests, and is kept."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftwood_model_runner.engine import Engine
from draftwood_model_runner.plain_decoding import OwnText
from draftwood_model_runner.request import StopParams
from draftwood_strategies import create
from draftwood_strategies.arrays import Int32Array, Integer
from draftwood_strategies.successors import ORDERS, WIDTH, WRITTEN, extended, find, has_layout
from tests.model_runner import test_hybrids as hybrids
from tests.model_runner.families import greedy, reference, served
from tests.model_runner.sequences import engine_of, make_sequence, run

TOKENS = 960
QUESTION = "How do I cancel my order?"
NEW_TOKENS = 50


def made_engine(**options: Any) -> Engine:
    return engine_of(served("bundled"), 32, **options)


def written(engine: Engine, tokens: int = TOKENS, cache: Path | None = None) -> Int32Array:
    own_text = engine.own_text(tokens, cache)
    while not own_text.done:
        own_text.step()
    engine.check()
    return own_text.rows


def steps_to_answer(engine: Engine, name: str) -> int:
    """In how many steps a tenant without a memory is answered."""
    prompt = engine.model.tokenizer.encode_chat([{"role": "user", "content": QUESTION}])
    sequence = make_sequence("q", prompt, StopParams(NEW_TOKENS), strategy=create(name), max_draft_nodes=32)
    run(engine, sequence)
    assert sequence.output == greedy("bundled", tuple(prompt.tolist()), NEW_TOKENS)
    return sequence.stats.decode_steps


def successors(rows: Int32Array, context: list[int]) -> list[int] | None:
    """What a table has for a context, the newest token last."""
    context_hash: Integer = 0
    for token in reversed(context):
        context_hash = extended(context_hash, token)
    row = find(rows, context_hash)
    return None if row < 0 else rows[row, :WIDTH].tolist()


def test_successors_are_the_most_probable_tokens_of_transformers() -> None:
    engine = made_engine(max_running=1)
    own_text = engine.own_text(60, None)
    for _ in range(20):
        own_text.step()
    [sequence] = own_text.with_pages
    text = sequence.tokens(0, sequence.length)
    while not own_text.done:
        own_text.step()
    with torch.inference_mode():
        logits = reference("bundled")(torch.from_numpy(text.astype(np.int64))[None]).logits[0]
    expected, compared = logits.topk(WIDTH).indices.numpy(), 0
    for end in range(sequence.request.prompt.size + ORDERS, text.size):
        for order in range(ORDERS, 0, -1):
            if (found := successors(own_text.rows, text[end - order : end].tolist())) is not None:
                compared += found == expected[end - 1].tolist()
                break
    assert compared > 0.6 * (text.size - sequence.request.prompt.size - ORDERS)  # short contexts come again elsewhere


@pytest.mark.parametrize("name", ["recycling", "hybrid"])
def test_first_answers_take_fewer_steps_and_are_those_of_generate(name: str) -> None:
    engine = made_engine()
    cold = steps_to_answer(engine, name)
    rows = written(engine)
    assert has_layout(rows)
    before = rows.copy()
    assert steps_to_answer(engine, name) < 0.9 * cold
    np.testing.assert_array_equal(rows, before)


def test_requests_come_first_and_change_nothing_of_it() -> None:
    engine = made_engine()
    expected = written(engine, 400)
    own_text = engine.own_text(400, None)
    steps = 0
    while not own_text.done:
        own_text.step()
        steps += 1
        if steps % 50 == 10:
            steps_to_answer(engine, "recycling")
            assert not own_text.with_pages
            engine.check()
    assert steps > 110
    np.testing.assert_array_equal(own_text.rows, expected)


@pytest.mark.parametrize("runner", ["openvino", "cuda", pytest.param("recurrent layers", marks=pytest.mark.system)])
def test_every_runner_writes_it(runner: str) -> None:
    model = hybrids.served("qwen3_next small") if runner == "recurrent layers" else served("llama", runner)
    engine = engine_of(model, 4)
    own_text = engine.own_text(8, None)
    for _ in range(4):
        own_text.step()
    own_text.pause()
    while not own_text.done:
        own_text.step()
    engine.check()
    assert np.count_nonzero(own_text.rows[:, WRITTEN]) >= 8


def test_memory_for_one_text_alone_suffices() -> None:
    engine = made_engine(kv_cache_tokens=served("bundled").max_context + 32, prefix_cache=False)
    own_text = engine.own_text(5 * 160, None)
    widths = set()
    while not own_text.done:
        own_text.step()
        widths.add(len(own_text.with_pages))
    engine.check()
    assert has_layout(own_text.rows)
    assert len(widths) > 2  # not always all of them
    assert engine.kv_use.held == 0


def test_closed_before_its_end_it_holds_nothing() -> None:
    engine = made_engine()
    own_text = engine.own_text(TOKENS, None)
    for _ in range(5):
        own_text.step()
    assert own_text.with_pages
    another = engine.own_text(TOKENS, None)  # ends the one before
    assert own_text.done
    assert not own_text.with_pages
    another.step()
    assert another.with_pages
    engine.close()
    assert another.done
    assert not another.with_pages
    engine.check()


def test_a_file_is_read_again_and_a_damaged_one_written_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = made_engine()
    rows = written(engine, 100, tmp_path)
    [file] = tmp_path.iterdir()
    assert engine.own_text(100, tmp_path).done
    np.testing.assert_array_equal(written(engine, 100, tmp_path), rows)
    outside = rows.copy()
    outside[0, 0] = engine.model.vocab_size
    with caplog.at_level(logging.WARNING):
        for damage in (file.read_bytes()[:-100], b"", None):
            if damage is None:
                np.save(file, outside)
            else:
                file.write_bytes(damage)
            np.testing.assert_array_equal(written(engine, 100, tmp_path), rows)
            np.testing.assert_array_equal(np.load(file), rows)
    assert caplog.text.count("the model's own text in ") == 3
    assert [*tmp_path.iterdir()] == [file]


def test_a_folder_that_cannot_be_written_costs_the_file_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert has_layout(written(made_engine(), 100, tmp_path / "file" / "folder"))
    assert "was not kept" in caplog.text


def test_a_failing_step_leaves_no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = made_engine()
    own_text = engine.own_text(TOKENS, None)
    assert isinstance(own_text, OwnText)
    own_text.step()
    monkeypatch.setattr(engine._runner, "step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        own_text.step()
    own_text.close()
    engine.check()
