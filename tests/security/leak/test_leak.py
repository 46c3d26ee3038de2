"""Sizes and times of TLS records tell the prompt of an answer, and do not with cadence, padding and rounding."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from draftwood_benchmarks.closed_loop import fitting
from draftwood_benchmarks.harness.prompts import read_prompts
from draftwood_benchmarks.harness.servers import server_process
from draftwood_client import AsyncClient, GenerateOptions, TlsConfig
from tests.certificates import make_certificate
from tests.security.leak.classifier import (
    Features,
    Guessed,
    Record,
    Seen,
    all_features,
    ask_all,
    guess,
    size_features,
    time_features,
)

SERVED_PROMPTS, REPETITIONS = 6, 8
ROUNDING, PADDED = 10, 1024
GREEDY: GenerateOptions = {"max_tokens": 48, "temperature": 0.0, "ignore_eos": True}
"""All answers have one length, which so tells nothing."""
CADENCE, PADDING = ("--delta-cadence", "0.05"), ("--delta-padding", str(PADDED))
DEFENCES = (*CADENCE, *PADDING, "--delta-rounding", str(ROUNDING))


_CLIENTS = 2
_FLAGS = ("--threads", "1", "--stream-interval", "0", "--max-running", str(_CLIENTS))
"""A message for each step, as of models whose steps take longer than the default interval."""


def eavesdrop(flags: Sequence[str], prompts: int, repetitions: int, options: GenerateOptions) -> list[Seen]:
    """The answers of a service with these flags, and what the wire showed of them.

    The memory is warm: each prompt was answered once before.

    Args:
        prompts: the first of the bundled ones.
        repetitions: answers to each of them; half of them to train with.
    """

    async def answers(target: str, pem: bytes) -> list[Seen]:
        async with AsyncClient(target, tls=TlsConfig(pem)) as client:
            info = await client.model_info()
            asked = (await fitting(client, info, read_prompts(None), options["max_tokens"] or 1))[:prompts]
        await ask_all(target, pem, asked, _CLIENTS, 1, options)
        return await ask_all(target, pem, asked, _CLIENTS, repetitions, {**options, "learn": False})

    with TemporaryDirectory(prefix="draftwood-") as folder:
        certificate, key = make_certificate(Path(folder))
        with server_process(*_FLAGS, "--tls-cert", str(certificate), "--tls-key", str(key), *flags) as server:
            return asyncio.run(answers(server.target, certificate.read_bytes()))


def guessed(answers: Sequence[Seen], features: Callable[..., Features]) -> Guessed:
    """How well the prompts of half of the answers are guessed, with the other half to train with."""
    halves = [[answer for answer in answers if answer.repetition % 2 == half] for half in (0, 1)]
    vectors = [np.array([features(one.records, one.sent_at) for one in half]) for half in halves]
    known, others = ([one.prompt for one in half] for half in halves)
    return guess(vectors[0], known, vectors[1], others)


def prices(answers: Sequence[Seen], base: Sequence[Seen]) -> dict[str, float]:
    """Medians of the answers over those of others: bytes, TTFT, tokens per second up to the last token, duration."""
    prices: dict[str, Callable[[Seen], float]] = {
        "bytes": lambda answer: answer.bytes,
        "ttft": lambda answer: answer.first_at - answer.sent_at,
        "tokens_per_second": lambda answer: answer.tokens / (answer.last_at - answer.sent_at),
        "duration": lambda answer: answer.ended_at - answer.sent_at,
    }
    return {name: round(median(map(of, answers)) / median(map(of, base)), 3) for name, of in prices.items()}


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
