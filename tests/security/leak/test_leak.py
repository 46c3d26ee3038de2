"""Sizes and times of TLS records tell the prompt of an answer, and do not with cadence, padding and rounding."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise
from statistics import median

import numpy as np
import pytest

from draftwood_client import GenerateOptions
from tests.security.leak.answers import Seen
from tests.security.leak.classifier import all_features, guess, size_features, time_features
from tests.security.leak.serving import eavesdrop, guessed, prices
from tests.security.leak.wire import Record, RecordReader, eavesdropped

PROMPTS, ANSWERS = 6, 16
SERVED_PROMPTS, REPETITIONS = 6, 8
ROUNDING, PADDED = 10, 1024
GREEDY: GenerateOptions = {"max_tokens": 48, "temperature": 0.0, "ignore_eos": True}
"""All answers have one length, which so tells nothing."""
CADENCE, PADDING = ("--delta-cadence", "0.05"), ("--delta-padding", str(PADDED))
DEFENCES = (*CADENCE, *PADDING, "--delta-rounding", str(ROUNDING))


def record(size: int) -> bytes:
    """A TLS record of application data with `size` bytes in it."""
    return b"\x17\x03\x03" + size.to_bytes(2) + bytes(size)


def test_records_are_found_however_the_bytes_are_cut() -> None:
    sizes = [100, 17, 16_401, 300, 34, 35]
    data = b"".join(map(record, sizes))
    for step in (1, 7, 1000, len(data)):
        seen = RecordReader()
        for start in range(0, len(data), step):
            seen.feed(data[start : start + step], start)
        # Records of 39 bytes and less hold no message.
        assert [size for _, size in seen.records] == [105, 16_406, 305, 40]


async def test_only_what_the_server_sends_is_seen() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(record(50)))
        writer.write(record(200) + record(300))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with eavesdropped(f"127.0.0.1:{port}") as (address, wire):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
        writer.write(record(50))
        assert await reader.read() == record(200) + record(300)
        writer.close()
    server.close()
    assert [size for _, size in wire.records] == [205, 305]
    assert wire.records[0][0] > 0


def answers_of(prompt: int, chance: random.Random, leaks: bool) -> list[Record]:
    """Records whose sizes depend on the prompt, if it leaks, with noise."""
    base = random.Random(prompt if leaks else 0)
    sizes = [base.randint(50, 120) for _ in range(30)]
    return [(0.01 * (i + chance.random()), size + chance.randint(0, 3)) for i, size in enumerate(sizes, 1)]


@pytest.mark.parametrize("leaks", [True, False])
def test_the_classifier_finds_what_leaks_and_nothing_else(leaks: bool) -> None:
    chance = random.Random(1)
    labels = [prompt for prompt in range(PROMPTS) for _ in range(ANSWERS)]
    halves = [np.array([all_features(answers_of(prompt, chance, leaks), 0.0) for prompt in labels]) for _ in range(2)]
    found = guess(halves[0], labels, halves[1], labels)
    assert found.low <= found.accuracy <= found.high
    assert found.accuracy > 0.95 if leaks else found.low < 1 / PROMPTS


def test_features_have_one_length_for_all_answers() -> None:
    for features in (all_features, size_features, time_features):
        lengths = {features([(0.1 * i, 60) for i in range(1, count)], 0.0).size for count in (2, 5, 400)}
        assert len(lengths) == 1


def test_sizes_do_not_know_times_and_times_no_sizes() -> None:
    records = [(0.1, 50), (0.2, 60), (0.4, 70)]
    moved, larger = [(time + 1, size) for time, size in records], [(time, size + 9) for time, size in records]
    assert np.array_equal(size_features(records, 0.0), size_features(moved, 0.0))
    assert np.array_equal(time_features(records, 0.0), time_features(larger, 0.0))


@pytest.fixture(scope="module")
def undefended() -> list[Seen]:
    """Without drafts each message has one token, so the sizes are the same each time."""
    return eavesdrop((), SERVED_PROMPTS, REPETITIONS, {**GREEDY, "drafting": False})


def test_an_answer_tells_its_prompt(undefended: list[Seen]) -> None:
    """Otherwise the tests below would pass whatever a service sends."""
    assert guessed(undefended, size_features).accuracy > 0.8


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
        found[name] = max(guesses, key=lambda one: one.expected)
        print(name, found[name], prices(answers, base))
    assert found["none"].low > 1 / 12
    assert found["both"].low < 1 / 12
    assert found["all"].low < 1 / 12
