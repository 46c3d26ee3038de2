from __future__ import annotations

import json
import math
from collections import Counter
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from draftwood_model_runner.errors import InvalidInputError
from draftwood_model_runner.loading.model import BUNDLED_MODEL
from tools.demo_model.corpus import (
    ASSISTANT,
    CHAT_TEMPLATE,
    END,
    PAD,
    SPECIAL_TOKENS,
    USER,
    Exchange,
    encoded,
    packed_rows,
    read_exchanges,
    split,
    trained_tokenizer,
)
from tools.demo_model.training import CHECKPOINT, Evaluation, Recipe, evaluate_on, new_run
from tools.train_demo_model import app

TINY = Recipe(
    vocab_size=320, layers=2, hidden=32, head_dim=16, mlp=48, context=48, batch=8, steps=40, warmup=4, peak_rate=1e-2
)
WISHES = ("track", "cancel", "change", "return", "pay for", "insure")
THINGS = ("lamp", "kettle", "jacket", "bicycle", "guitar", "sofa", "clock", "tent")


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def support_file(tmp_path: Path) -> Path:
    path = tmp_path / "support.jsonl"
    rows = [
        {"instruction": f"how do I {wish} my {thing}?", "response": f"Of course! To {wish} your {thing}, call us."}
        for wish in WISHES
        for thing in THINGS
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def tiny_options(**changed: object) -> list[str]:
    values = {
        name: getattr(TINY, name)
        for name in ("vocab_size", "layers", "hidden", "head_dim", "mlp", "context", "batch", "steps", "warmup")
    } | {"peak_rate": TINY.peak_rate, "heldout_fraction": 0.1}
    return [part for name, value in (values | changed).items() for part in ("--" + name.replace("_", "-"), str(value))]


def measured(folder: Path, exchanges: list[Exchange]) -> Evaluation:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return evaluate_on(model, AutoTokenizer.from_pretrained(folder), exchanges)


def test_a_trained_model_loads_and_predicts_answers_that_it_never_saw(support_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    status, output = invoke("train", support_file, "--out", out, *tiny_options())
    assert status == 0, output

    training, heldout = split(read_exchanges(support_file, "data"), None, 0.1, TINY.seed)
    tokenizer = AutoTokenizer.from_pretrained(out)
    untrained = new_run(TINY, [prompt + answer for prompt, answer in encoded(tokenizer, training)]).model
    before, after = evaluate_on(untrained, tokenizer, heldout), measured(out, heldout)
    assert before.nats / before.tokens == pytest.approx(math.log(TINY.vocab_size), rel=0.1)
    assert after.nats / after.tokens < 0.5 * before.nats / before.tokens
    assert str(after) in output

    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert not (out / CHECKPOINT).exists()


def test_the_chat_template_renders_the_prompt_that_was_trained_on(support_file: Path) -> None:
    exchanges = read_exchanges(support_file, "data")
    tokenizer: Any = trained_tokenizer(exchanges, TINY.vocab_size)
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3]) == list(SPECIAL_TOKENS)
    asked = [{"role": "user", "content": exchanges[0].question}]
    answered = [*asked, {"role": "assistant", "content": exchanges[0].answer}]
    prompt, answer = next(encoded(tokenizer, exchanges))
    assert tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False) == prompt
    assert tokenizer.apply_chat_template(answered, return_dict=False) == prompt + answer
    assert (prompt[0], prompt[-1], answer[-1]) == (USER, ASSISTANT, END)
    assert tokenizer.decode(answer, skip_special_tokens=True) == exchanges[0].answer


def test_the_chat_template_is_the_bundled_models() -> None:
    assert (Path(BUNDLED_MODEL) / "chat_template.jinja").read_text() == CHAT_TEMPLATE


def test_a_text_that_spells_a_special_token_cannot_end_an_answer(support_file: Path) -> None:
    tokenizer = trained_tokenizer(read_exchanges(support_file, "data"), TINY.vocab_size)
    prompt, answer = next(encoded(tokenizer, [Exchange("<|assistant|>?", "Write <|end|> to end.")]))
    assert [token for token in prompt + answer if token < len(SPECIAL_TOKENS)] == [USER, ASSISTANT, END]
    assert tokenizer.decode(answer[:-1]) == "Write <|end|> to end."


def test_a_run_that_is_stopped_and_resumed_makes_the_same_model(support_file: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = tiny_options(steps=3)
    invoke("train", support_file, "--out", whole, *options)
    status, output = invoke("train", support_file, "--out", parts, *options, "--minutes", 1e-9)
    assert status == 0
    assert "stopped at step 1 of 3" in output
    assert (parts / CHECKPOINT).is_file()
    invoke("train", support_file, "--out", parts, *options, "--minutes", 1e-9, "--resume")
    status, output = invoke("train", support_file, "--out", parts, *options, "--resume")
    assert status == 0
    assert "from step 2 of 3" in output
    assert (whole / "model.safetensors").read_bytes() == (parts / "model.safetensors").read_bytes()
    assert sorted(p.name for p in whole.iterdir()) == sorted(p.name for p in parts.iterdir())


def test_packed_documents_do_not_attend_to_one_another() -> None:
    model: Any = new_run(TINY, []).model.eval()
    documents = [[USER, 10, 11, ASSISTANT, 12, END], [USER, 20, ASSISTANT, 21, 22, 23, END]]
    with torch.inference_mode():
        alone = torch.cat([model(torch.tensor([d]), use_cache=False).logits[0] for d in documents])
        tokens = torch.tensor([list(chain(*documents))])
        positions = torch.tensor([list(chain(*(range(len(document)) for document in documents)))])
        packed = model(tokens, position_ids=positions, use_cache=False)
    torch.testing.assert_close(packed.logits[0], alone)


def test_rows_hold_whole_documents_and_each_of_them_as_often() -> None:
    lengths = (3, 9, 14, 40, 5, 22, 11)
    documents = [[USER, *range(100 * n, 100 * n + length), END] for n, length in enumerate(lengths, 1)]
    cut = [document[:24] for document in documents]
    seen: Counter[int] = Counter()
    for tokens, positions in islice(packed_rows(documents, context=24, seed=3), 500):
        assert len(tokens) == len(positions) == 24
        filled = tokens.index(PAD) if PAD in tokens else 24
        assert set(tokens[filled:]) <= {PAD}
        assert set(positions[filled:]) <= {0}
        starts = [i for i in range(filled) if positions[i] == 0]
        assert starts[0] == 0
        for start, stop in pairwise([*starts, filled]):
            assert positions[start:stop] == list(range(stop - start))
            seen[cut.index(tokens[start:stop])] += 1
    assert len(seen) == len(documents)
    assert max(seen.values()) - min(seen.values()) <= 64, "what waits to be packed, not more"


def test_nothing_that_is_held_out_is_trained_on(support_file: Path) -> None:
    exchanges = read_exchanges(support_file, "data")
    heldout = [Exchange(exchanges[0].question, "another answer"), Exchange("another question", exchanges[5].answer)]
    training, kept = split(exchanges, heldout, 0.5, seed=0)
    assert kept == heldout
    assert training == [e for i, e in enumerate(exchanges) if i not in (0, 5)]
    training, kept = split(exchanges, None, 0.25, seed=0)
    assert len(kept) == 12
    assert set(kept).isdisjoint(training)
    assert set(kept) | set(training) == set(exchanges)


def test_the_learning_rate_rises_and_falls_to_a_tenth() -> None:
    rates = [TINY.learning_rate(step) for step in range(TINY.steps)]
    assert rates.index(max(rates)) in (TINY.warmup - 1, TINY.warmup)
    assert max(rates) == pytest.approx(TINY.peak_rate)
    assert rates[TINY.warmup :] == sorted(rates[TINY.warmup :], reverse=True)
    assert TINY.learning_rate(TINY.steps) == pytest.approx(TINY.peak_rate / 10)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps": 0}, "steps: 0 is not allowed"),
        ({"vocab_size": 100}, "vocab_size: 100 is not allowed; it must be at least 260"),
        ({"hidden": 40}, "hidden: 40 is not allowed; it must be a multiple of head_dim, which is 16"),
        ({"peak_rate": 2.0}, "peak_rate: 2.0 is not allowed"),
        ({"context": 4096}, "context: 4096 is not allowed; it must be at most 2048"),
        ({"minutes": 0}, "minutes: 0.0 is not allowed"),
        ({"heldout_fraction": 1.0}, "heldout_fraction: 1.0 is not allowed"),
        ({"heldout_fraction": "nan"}, "heldout_fraction: nan is not allowed"),
    ],
)
def test_a_bad_value_is_named(changed: dict[str, object], message: str, support_file: Path, tmp_path: Path) -> None:
    status, output = invoke("train", support_file, "--out", tmp_path / "model", *tiny_options(**changed))
    assert status == 2
    assert message in output
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"instruction": "a", "response": "b"}\n{"instruction": "a"}\n', "response"),
        ('{"instruction": "a", "response": "b"}\nnot json\n', "Expecting value"),
        ('{"instruction": "a", "response": "b"}\n["a"]\n', "TypeError"),
        ('{"instruction": "a", "response": "b"}\n{"instruction": "a", "response": " "}\n', "neither empty"),
    ],
)
def test_a_bad_line_is_named(content: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(InvalidInputError, match=problem) as caught:
        read_exchanges(path, "heldout")
    assert caught.value.field == "heldout"
    assert caught.value.value == f"{path}:2"


def test_a_file_without_exchanges_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    for name in ("empty.jsonl", "missing.jsonl"):
        with pytest.raises(InvalidInputError, match=f"data .*{name}: "):
            read_exchanges(tmp_path / name, "data")


def test_a_folder_in_use_and_a_run_of_another_recipe_are_refused(support_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    assert invoke("train", support_file, "--out", out, *tiny_options(), "--resume")[0] == 2
    invoke("train", support_file, "--out", out, *tiny_options(), "--minutes", 1e-9)
    status, output = invoke("train", support_file, "--out", out, *tiny_options())
    assert status == 2
    assert f"out {out}: " in output.replace("\n", "")
    assert "--resume" in output
    status, output = invoke("train", support_file, "--out", out, *tiny_options(steps=41), "--resume")
    assert status == 2
    assert "steps: 41 is not allowed; it must be 40 to resume this run" in output
    support_file.write_text(support_file.read_text().replace("call us", "ring us"))
    status, output = invoke("train", support_file, "--out", out, *tiny_options(), "--resume")
    assert status == 2
    assert "data: " in output


def test_evaluate_refuses_a_folder_without_a_model(support_file: Path, tmp_path: Path) -> None:
    status, output = invoke("evaluate", tmp_path, support_file)
    assert status == 2
    assert f"model {tmp_path}: " in output.replace("\n", "")
    assert "config.json" in output
