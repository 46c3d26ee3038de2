"""Sizes and times of TLS records tell the prompt of an answer, and do not with cadence, padding and rounding."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

import pytest

from draftwood_client import GenerateOptions
from tests.security.leak.classifier import Record, Seen, all_features, size_features, time_features
from tests.security.leak.serving import eavesdrop, guessed, prices

SERVED_PROMPTS, REPETITIONS = 6, 8
ROUNDING, PADDED = 10, 1024
GREEDY: GenerateOptions = {"max_tokens": 48, "temperature": 0.0, "ignore_eos": True}
"""All answers have one length, which so tells nothing."""
CADENCE, PADDING = ("--delta-cadence", "0.05"), ("--delta-padding", str(PADDED))
DEFENCES = (*CADENCE, *PADDING, "--delta-rounding", str(ROUNDING))


@pytest.fixture(scope="module")
def undefended() -> list[Seen]:
    """Without drafts each message has one token, so the sizes are the same each time."""
    return eavesdrop((), SERVED_PROMPTS, REPETITIONS, {**GREEDY, "drafting": False})


def test_an_answer_tells_its_prompt(undefended: list[Seen]) -> None:
    """Otherwise the tests below would pass whatever a service sends."""
    for features in (size_features, all_features):
        assert guessed(undefended, features).accuracy > 0.8


def deltas_of(answer: Seen) -> list[Record]:
    """Those between Started, whose record may follow one of the call's headers, and Finished with the call's status."""
    started = next(number for number, (_, size) in enumerate(answer.records) if size > PADDED)
    return answer.records[started + 1 : -2]


@pytest.mark.timeout(300)
def test_cadence_padding_and_rounding_hide_it(undefended: list[Seen]) -> None:
    """All deltas have one size and one distance, and their number is rounded, so no prompt is guessed.

    12 of 24 right are more than chance, a sixth, gives with a probability of 0.02%.
    """
    defended = eavesdrop(DEFENCES, SERVED_PROMPTS, REPETITIONS, GREEDY)
    found = {of.__name__: guessed(defended, of) for of in (size_features, time_features, all_features)}
    costs = prices(defended, undefended)
    print(found, costs)
    deltas = [deltas_of(answer) for answer in defended]
    assert len({size for records in deltas for _, size in records}) == 1
    assert {len(records) % ROUNDING for records in deltas} == {0}
    assert min(median(later - time for (time, _), (later, _) in pairwise(records)) for records in deltas) > 0.04
    assert [name for name, guess in found.items() if guess.accuracy >= 0.5] == []
    assert len(defended) == SERVED_PROMPTS * REPETITIONS
    assert {answer.tokens for answer in defended} == {answer.tokens for answer in undefended}
    assert costs["bytes"] > 1.0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_each_defence_alone_and_together() -> None:
    """The measurement of docs/security.md; `pytest -rP` prints its figures."""
    sampled: GenerateOptions = {**GREEDY, "temperature": 0.3}
    base = eavesdrop((), 12, 10, sampled)
    defences = {"none": (), "padding": PADDING, "cadence": CADENCE, "both": (*CADENCE, *PADDING), "all": DEFENCES}
    found = {}
    for name, flags in defences.items():
        answers = eavesdrop(flags, 12, 10, sampled) if flags else base
        guesses = [guessed(answers, of) for of in (size_features, time_features, all_features)]
        found[name] = max(guesses, key=lambda guess: guess.expected)
        print(name, found[name], prices(answers, base))
    assert found["none"].low > 1 / 12
    assert found["both"].low < 1 / 12
    assert found["all"].low < 1 / 12
