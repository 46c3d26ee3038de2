"""The demo's questions: 20 that are measured, 120 that the warm memory learns from, none of them twice."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

import draftwood_benchmarks

FILE = Path(draftwood_benchmarks.__path__[0]) / "questions.jsonl"
INTENTS = 27
"""The intents of the data that the bundled model was trained on."""

Question = dict[str, str]


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    return [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


def of_split(questions: list[Question], split: str) -> list[Question]:
    return [question for question in questions if question["split"] == split]


def words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", text.lower().replace("'", "")))


def test_every_line_is_a_question_of_usable_length(questions: list[Question]) -> None:
    for question in questions:
        assert set(question) == {"text", "intent", "split"}
        assert question["text"] == question["text"].strip()
        assert re.fullmatch(r"[a-z]+(_[a-z]+)+|complaint|review", question["intent"])
        assert 8 <= len(question["text"]) <= 240
        assert question["text"].isascii()
        assert question["text"].isprintable()
        assert "<|" not in question["text"]


def test_the_measured_questions_come_first_each_of_another_intent(questions: list[Question]) -> None:
    assert [question["split"] for question in questions] == ["measured"] * 20 + ["warmup"] * 120
    assert len({question["intent"] for question in of_split(questions, "measured")}) == 20


def test_the_warm_up_covers_every_intent(questions: list[Question]) -> None:
    covered = Counter(question["intent"] for question in of_split(questions, "warmup"))
    assert len(covered) == INTENTS
    assert min(covered.values()) >= 4
    assert {question["intent"] for question in questions} == set(covered)


def test_no_question_nearly_repeats_another(questions: list[Question]) -> None:
    bags = [words(question["text"]) for question in questions]
    for i, bag in enumerate(bags):
        for j in range(i):
            alike = len(bag & bags[j]) / len(bag | bags[j])
            assert alike <= 0.5, (questions[i]["text"], questions[j]["text"])
