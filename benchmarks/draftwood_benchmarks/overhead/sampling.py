"""What it takes to choose a token by the size of the vocabulary, and to find the most probable ones of a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from draftwood_model_runner.request import Request, SamplingParams, StopParams
from draftwood_model_runner.sampling.host.cpus import usable_cpus
from draftwood_model_runner.sampling.host.most_probable import most_probable
from draftwood_model_runner.sampling.token_chooser import TokenChooser
from draftwood_model_runner.sequence import Sequence

VOCABULARIES = (4_096, 32_000, 151_936, 262_144)
_TEMPERATURE = 0.6
OPTIONS = ((20, 0.95), (0, 0.95), (0, 1.0))
"""Pairs of top-k and top-p that are measured."""
_TARGETS_MS = {(151_936, 20, 0.95): 0.3, (151_936, 0, 0.95): 1.0}
_ROWS, _TOP = 49, 8
"""Of a step with 48 draft nodes whose most probable tokens a drafter learns from."""
_DEVIATION, _LIKELY, _ABOVE = 2.5, 30, 14.0
"""Made-up logits: normal, and a few likely tokens up to so much above them."""


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """Medians.

    Attributes:
        choose_ms: milliseconds of `TokenChooser.choose` at temperature 0.6.
        flat_ms: the same for logits without likely tokens, of which top-p keeps thousands.
        most_probable_ms: of the 8 most probable tokens of 49 rows, by all cores.
    """

    vocabulary: int
    top_k: int
    top_p: float
    choose_ms: float
    flat_ms: float
    most_probable_ms: float


def measured_sampling(rounds: int) -> list[SamplingRow]:
    """A row for each vocabulary and pair of options."""
    rows = []
    for vocabulary in VOCABULARIES:
        flat, likely = _logits(vocabulary)
        threads = usable_cpus()

        def find(logits: Any = likely, threads: int = threads) -> None:
            most_probable(logits, _TOP, threads)

        top_ms = _median_ms(find, 5 * rounds)
        for top_k, top_p in OPTIONS:
            choose_ms, flat_ms = (_choose_ms(logits, top_k, top_p, rounds) for logits in (likely, flat))
            rows.append(SamplingRow(vocabulary, top_k, top_p, choose_ms, flat_ms, top_ms))
    return rows


def _logits(vocabulary: int) -> tuple[Any, Any]:
    """float32[row, vocab], without and with likely tokens."""
    random = np.random.default_rng(0)
    flat = (random.standard_normal((_ROWS, vocabulary)) * _DEVIATION).astype(np.float32)
    likely = flat.copy()
    for row in likely:
        row[random.integers(0, vocabulary, _LIKELY)] += random.random(_LIKELY).astype(np.float32) * _ABOVE
    return flat, likely


def _choose_ms(logits: Any, top_k: int, top_p: float, rounds: int) -> float:
    params = SamplingParams(temperature=_TEMPERATURE, top_k=top_k, top_p=top_p, seed=1)
    prompt = np.arange(8, dtype=np.int32)
    request = Request(request_id="r", prompt=prompt, stop=StopParams(100_000), sampling=params)
    chooser = TokenChooser(Sequence(request), frozenset(), logits.shape[1])
    number = iter(range(1 << 30))

    def choose() -> None:
        chooser.choose(logits[next(number) % _ROWS], [0])

    return _median_ms(choose, 30 * rounds)


def _median_ms(call: Callable[[], None], times: int) -> float:
    call()
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return round(1e3 * float(np.median(seconds)), 4)


def sampling_table(rows: list[SamplingRow], title: str) -> Table:
    headings = "vocabulary", "top-k", "top-p", "choose ms", "target", "flat ms", f"top {_TOP} of {_ROWS} rows, ms"
    table = Table(*headings, title=title, title_justify="left")
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        target = _TARGETS_MS.get((row.vocabulary, row.top_k, row.top_p))
        table.add_row(
            f"{row.vocabulary:,}",
            str(row.top_k or "-"),
            f"{row.top_p:g}",
            f"{row.choose_ms:.3f}",
            "" if target is None else f"< {target:g}",
            f"{row.flat_ms:.3f}",
            f"{row.most_probable_ms:.3f}",
        )
    return table


def draw_sampling(axes: Any, rows: list[SamplingRow]) -> None:
    for top_k, top_p in OPTIONS:
        own = [row for row in rows if (row.top_k, row.top_p) == (top_k, top_p)]
        label = f"top-k {top_k or 'off'}, top-p {top_p:g}"
        axes.plot([row.vocabulary for row in own], [row.choose_ms for row in own], "o-", label=label)
    axes.set_xlabel("tokens in the vocabulary")
    axes.set_ylabel("milliseconds to choose a token")
    axes.legend()
