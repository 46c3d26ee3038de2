"""Host time to choose a token, and to find the most probable ones of a step, by the size of the vocabulary."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import numpy as np

from draftwood_benchmarks.overhead.decoding import host_row
from draftwood_model_runner.request import Request, SamplingParams, StopParams
from draftwood_model_runner.sampling.host.most_probable import most_probable
from draftwood_model_runner.sampling.token_sampler import TokenSampler
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies.threads.cpus import usable_cpus

VOCABULARIES = (4_096, 32_000, 151_936, 262_144)
OPTIONS = ((20, 0.95), (0, 0.95), (0, 1.0))
"""Pairs of top-k and top-p that are measured."""
_ROWS, _TOP = 49, 8
"""Of a step with 48 draft nodes whose most probable tokens a drafter learns from."""
_DEVIATION, _LIKELY, _ABOVE = 2.5, 30, 14.0
"""Made-up logits: normal, and a few likely tokens up to so much above them."""


def sampling_rows(rounds: int) -> Iterator[dict[str, Any]]:
    """One for each vocabulary and pair of options; "choose_ms" are the milliseconds of `TokenSampler.sample` at
    temperature 0.6, median."""
    for vocabulary in VOCABULARIES:
        logits = _logits(vocabulary)
        for top_k, top_p in OPTIONS:
            milliseconds = _sample_us(logits, top_k, top_p, 30 * rounds) / 1000
            yield {"vocabulary": vocabulary, "top_k": top_k, "top_p": top_p, "choose_ms": milliseconds}


def by_vocabulary(rounds: int) -> Iterator[dict[str, Any]]:
    """Those rows, and the median time of the 8 most probable tokens of 49 rows."""
    for row in sampling_rows(rounds):
        what = f"choosing a token, top-k {row['top_k'] or 'off'}, top-p {row['top_p']:g}"
        yield host_row("vocabulary", row["vocabulary"], what, round(1000 * row["choose_ms"], 1))
    for vocabulary in VOCABULARIES:
        logits = _logits(vocabulary)
        found = _median_us(lambda: most_probable(logits, _TOP, usable_cpus()), 5 * rounds)  # noqa: B023
        yield host_row("vocabulary", vocabulary, f"top {_TOP} of {_ROWS} rows", found)


def _logits(vocabulary: int) -> Any:
    """float32[row, vocab]."""
    random = np.random.default_rng(0)
    logits = (random.standard_normal((_ROWS, vocabulary)) * _DEVIATION).astype(np.float32)
    for row in logits:
        row[random.integers(0, vocabulary, _LIKELY)] += random.random(_LIKELY).astype(np.float32) * _ABOVE
    return logits


def _sample_us(logits: Any, top_k: int, top_p: float, times: int) -> float:
    params = SamplingParams(temperature=0.6, top_k=top_k, top_p=top_p, seed=1)
    prompt = np.arange(8, dtype=np.int32)
    request = Request(request_id="r", prompt=prompt, stop=StopParams(100_000), sampling=params)
    sampler, rows = TokenSampler(Sequence(request), frozenset(), logits.shape[1]), cycle(logits)
    return _median_us(lambda: sampler.sample_and_accept(next(rows), [0]), times)


def _median_us(call: Callable[[], object], times: int) -> float:
    call()
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return round(1e6 * float(np.median(seconds)), 1)
