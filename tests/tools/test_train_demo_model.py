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
    trained_tokenizer,
    without,
)
from tools.train_demo_model import Recipe, app, evaluation, new_model, trained

TINY = Recipe(
    vocab_size=320, layers=2, hidden=32, head_dim=16, mlp=48, context=48, batch=8, steps=40, warmup=4, peak_rate=1e-2
)
EXCHANGES: list[Exchange] = [
    (f"how do I {wish} my {thing}?", f"Of course! To {wish} your {thing}, call us.")
    for wish in ("track", "cancel", "change", "return", "pay for", "insure")
    for thing in ("lamp", "kettle", "jacket", "bicycle", "guitar", "sofa", "clock", "tent")
]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_trained_model_loads_and_predicts_answers_that_it_never_saw(tmp_path: Path) -> None:
    training, heldout = EXCHANGES[5:], EXCHANGES[:5]
    trained(training, tmp_path, TINY)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    before, after = (
        evaluation(model, tokenizer, heldout)
        for model in (new_model(TINY), AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    )
    assert before.nats / before.tokens == pytest.approx(math.log(TINY.vocab_size), rel=0.1)
    assert after.nats / after.tokens < 0.5 * before.nats / before.tokens
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_the_bundled_model_is_evaluated(tmp_path: Path) -> None:
    data = tmp_path / "heldout.jsonl"
    data.write_text("".join(json.dumps({"instruction": q, "response": a}) + "\n" for q, a in EXCHANGES[:2]))
    done = CliRunner().invoke(app, ["evaluate", str(BUNDLED_MODEL), str(data)])
    assert done.exit_code == 0, done.output
    assert "2 held-out answers: perplexity" in " ".join(done.output.split())


def test_the_chat_template_renders_the_prompt_that_was_trained_on() -> None:
    tokenizer: Any = trained_tokenizer(EXCHANGES, TINY.vocab_size)
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3]) == list(SPECIAL_TOKENS)
    question, written = EXCHANGES[0]
    asked = [{"role": "user", "content": question}]
    answered = [*asked, {"role": "assistant", "content": written}]
    prompt, answer = next(encoded(tokenizer, EXCHANGES))
    assert tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False) == prompt
    assert tokenizer.apply_chat_template(answered, return_dict=False) == prompt + answer
    assert (prompt[0], prompt[-1], answer[-1]) == (USER, ASSISTANT, END)
    assert tokenizer.decode(answer, skip_special_tokens=True) == written
    assert (Path(BUNDLED_MODEL) / "chat_template.jinja").read_text() == CHAT_TEMPLATE


def test_a_text_that_spells_a_special_token_cannot_end_an_answer() -> None:
    tokenizer = trained_tokenizer(EXCHANGES, TINY.vocab_size)
    prompt, answer = next(encoded(tokenizer, [("<|assistant|>?", "Write <|end|> to end.")]))
    assert [token for token in prompt + answer if token < len(SPECIAL_TOKENS)] == [USER, ASSISTANT, END]
    assert tokenizer.decode(answer[:-1]) == "Write <|end|> to end."


def test_packed_documents_do_not_attend_to_one_another() -> None:
    model: Any = new_model(TINY).eval()
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
        filled = tokens.index(PAD) if PAD in tokens else 24
        assert (tokens[filled:], positions[filled:]) == ([PAD] * (24 - filled), [0] * (24 - filled))
        starts = [i for i in range(filled) if positions[i] == 0]
        for start, stop in pairwise([*starts, filled]):
            assert positions[start:stop] == list(range(stop - start))
            seen[cut.index(tokens[start:stop])] += 1
    assert len(seen) == len(documents)
    assert max(seen.values()) - min(seen.values()) <= 64, "what waits to be packed, not more"


def test_nothing_that_is_held_out_is_trained_on() -> None:
    heldout = [(EXCHANGES[0][0], "another answer"), ("another question", EXCHANGES[5][1])]
    assert without(EXCHANGES, heldout) == [*EXCHANGES[1:5], *EXCHANGES[6:]]


def test_the_learning_rate_rises_and_falls_to_a_tenth() -> None:
    rates = [TINY.learning_rate(step) for step in range(TINY.steps)]
    assert rates.index(max(rates)) in (TINY.warmup - 1, TINY.warmup)
    assert max(rates) == pytest.approx(TINY.peak_rate)
    assert rates[TINY.warmup :] == sorted(rates[TINY.warmup :], reverse=True)
    assert TINY.learning_rate(TINY.steps) == pytest.approx(TINY.peak_rate / 10)
