"""What callers get, on every engine: prompts, greedy and sampled answers, ends, log-probabilities, formats."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any

import pytest

from draftwood_benchmarks.harness.prompts import read_questions
from draftwood_client import ChatMessage, Client, FinishReason, InvalidRequestError
from tests.engines.servers import CONTEXT, Served
from tests.model_runner.families import greedy

QUESTIONS = read_questions()[0][:4]
STORY = "Once upon a time there was"


def ids(client: Client, text: str) -> list[int]:
    return list(client.tokenize(text).token_ids)


def test_prompts_are_text_token_ids_or_a_conversation(client: Client) -> None:
    by_text = client.generate(STORY, max_tokens=12)
    assert client.generate(ids(client, STORY), max_tokens=12).token_ids == by_text.token_ids
    messages = [ChatMessage("user", QUESTIONS[0])]
    by_chat = client.generate(messages, max_tokens=12)
    assert by_chat.token_ids == client.generate(list(client.tokenize(messages).token_ids), max_tokens=12).token_ids
    assert by_text.usage.prompt_tokens == len(ids(client, STORY))
    assert by_text.usage.completion_tokens == len(by_text.token_ids)


@pytest.mark.parametrize("question", QUESTIONS)
def test_greedy_answers_are_those_of_transformers(client: Client, question: str) -> None:
    """Cold, and drafted from what was learned of the first."""
    prompt = ids(client, question)
    expected = greedy("bundled", tuple(prompt), 40)
    for _ in range(3):
        answer = client.generate(prompt, max_tokens=40, tenant="greedy")
        assert list(answer.token_ids) == expected


def test_the_stream_is_the_answer(client: Client) -> None:
    with client.stream(STORY, max_tokens=30, token_details=True) as stream:
        deltas = [*stream]
        answer = stream.completion()
    assert "".join(delta.text for delta in deltas) == answer.text
    assert "".join(detail.text for delta in deltas for detail in delta.details) == answer.text
    assert answer.text.lstrip() in client.detokenize(answer.token_ids)


def test_stop_strings_end_before_themselves(client: Client) -> None:
    plain = client.generate(STORY, max_tokens=40, ignore_eos=True)
    words = plain.text.split()
    stop = f"{words[5]} {words[6]}"  # across tokens
    for _ in range(2):
        answer = client.generate(STORY, max_tokens=40, ignore_eos=True, stop=[stop, "no such text"])
        assert answer.text == plain.text[: plain.text.index(stop)]
        assert (answer.finish_reason, answer.matched_stop) == (FinishReason.STOP, stop)
        assert len(answer.token_ids) < 40


def test_stop_tokens_end_with_themselves(client: Client) -> None:
    plain = client.generate(STORY, max_tokens=40, ignore_eos=True)
    token = plain.token_ids[9]
    first = plain.token_ids.index(token) + 1
    answer = client.generate(STORY, max_tokens=40, ignore_eos=True, stop_token_ids=[token])
    assert answer.token_ids == plain.token_ids[:first]
    assert (answer.finish_reason, answer.matched_stop) == (FinishReason.STOP, token)
    late = client.generate(STORY, max_tokens=40, ignore_eos=True, stop_token_ids=[token], min_tokens=20)
    assert len(late.token_ids) > 20


def test_answers_end_at_their_length_and_at_the_models_end(client: Client) -> None:
    assert client.generate(STORY, max_tokens=5).finish_reason is FinishReason.LENGTH
    asked = [ChatMessage("user", "Say hello.")]
    ended = client.generate(asked, max_tokens=150)
    assert ended.finish_reason is FinishReason.STOP
    assert ended.matched_stop in client.model_info().eos_token_ids
    with_special_tokens = client.generate(asked, max_tokens=150, include_special_tokens=True).text
    assert with_special_tokens.startswith(ended.text)
    assert len(with_special_tokens) > len(ended.text)
    assert client.generate(STORY, ignore_eos=True).usage.completion_tokens == CONTEXT - len(ids(client, STORY))


def test_samples_are_independent_and_seeds_reproduce_where_the_engine_says_so(client: Client, served: Served) -> None:
    answer = client.generate(STORY, max_tokens=12, temperature=1.0, n=4, seed=1)
    assert len({sample.token_ids for sample in answer.samples}) > 1
    assert all(1 <= len(sample.token_ids) <= 12 for sample in answer.samples)
    assert [sample.seed for sample in answer.samples] == [1, 2, 3, 4]
    answers = {client.generate(STORY, max_tokens=16, temperature=1.0, seed=7).token_ids for _ in range(3)}
    reproducible = client.model_info().abilities.reproducible_seeds
    assert reproducible == (served.engine == "draftwood")
    assert len(answers) == 1 or not reproducible


def test_the_distribution_of_samples_is_the_models(client: Client) -> None:
    """The first token of 200 samples, with drafts of earlier ones, against the log-probabilities."""
    prompt = ids(client, STORY)
    top = client.generate(prompt, max_tokens=1, top_logprobs=5, drafting=False).details[0].top_logprobs
    count, first = 200, Counter[int]()
    for round_ in range(count // 4):
        answer = client.generate(prompt, max_tokens=3, temperature=1.0, n=4, seed=1000 * round_, tenant="sampled")
        first.update(sample.token_ids[0] for sample in answer.samples)
    for one in top[:3]:
        p = math.exp(one.logprob)
        assert abs(first[one.token_id] / count - p) < 4.5 * math.sqrt(p * (1 - p) / count) + 0.005


def test_truncation_keeps_the_most_probable_tokens(client: Client) -> None:
    prompt = ids(client, STORY)
    best = client.generate(prompt, max_tokens=8, ignore_eos=True).token_ids
    variants: tuple[Any, ...] = ({"top_k": 1}, {"top_p": 1e-6})
    for options in variants:
        assert client.generate(prompt, max_tokens=8, ignore_eos=True, temperature=1.0, **options).token_ids == best


def test_greedy_answers_beside_sampled_ones(client: Client) -> None:
    """Drafted both, in one batch."""
    prompt = ids(client, QUESTIONS[1])
    expected = greedy("bundled", tuple(prompt), 40)
    for round_ in range(3):
        with client.stream(
            QUESTIONS[1], max_tokens=60, temperature=0.7, top_k=20, n=3, seed=round_, tenant="mixed"
        ) as beside:
            assert list(client.generate(prompt, max_tokens=40, tenant="mixed").token_ids) == expected
            beside.cancel()


def test_log_probabilities(client: Client) -> None:
    for _ in range(2):
        answer = client.generate(STORY, max_tokens=10, top_logprobs=3, tenant="logprobs")
        for token, detail in zip(answer.token_ids, answer.details, strict=True):
            best, second, third = detail.top_logprobs
            assert (best.token_id, best.bytes) == (token, detail.bytes)  # greedy
            assert detail.logprob == pytest.approx(best.logprob, abs=1e-5)
            assert best.logprob >= second.logprob >= third.logprob


def test_penalties_change_answers_in_the_same_way(client: Client) -> None:
    plain = client.generate(QUESTIONS[2], max_tokens=60, ignore_eos=True)
    variants: tuple[Any, ...] = ({"repetition_penalty": 1.5}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0})
    for options in variants:
        one, two = (client.generate(QUESTIONS[2], max_tokens=60, ignore_eos=True, **options) for _ in range(2))
        assert one.token_ids == two.token_ids
        assert len({*one.token_ids}) > len({*plain.token_ids})


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"enum": [7, 30, 65]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_json_schema(client: Client) -> None:
    for _ in range(2):
        answer = client.generate("A person:", max_tokens=80, json_schema=SCHEMA, tenant="formats")
        assert answer.finish_reason is FinishReason.STOP
        assert json.loads(answer.text).keys() == {"name", "age"}
        assert answer.text.startswith('{"name": "')  # laid out as json.dumps does


@pytest.mark.parametrize(
    ("name", "form", "expected"),
    [("regex", "[0-9]{4}-[0-9]{2}", "[0-9]{4}-[0-9]{2}"), ("lark", 'start: "yes" | "no" " "? "way"', "yes|no ?way")],
)
def test_regular_expressions_and_grammars(client: Client, name: str, form: str, expected: str) -> None:
    options: Any = {name: form}
    for _ in range(2):
        answer = client.generate("The date is", max_tokens=40, tenant="formats", **options)
        assert re.fullmatch(expected, answer.text)
        assert answer.finish_reason is FinishReason.STOP


def test_wrong_formats_are_refused(client: Client) -> None:
    variants: tuple[Any, ...] = ({"regex": "[0-9"}, {"json_schema": '{"type": "nothing"}'}, {"lark": "start: missing"})
    for options in variants:
        with pytest.raises(InvalidRequestError) as error:
            client.generate("x", max_tokens=5, **options)
        assert error.value.violations[0].field.startswith("format.")
