"""What drafting costs if it brings nothing: counted in calls, next to none."""

from __future__ import annotations

import functools
import itertools
import time
from typing import Any
from unittest import mock

import numpy as np
import pytest

from draftwood_model_runner.request import StopParams
from draftwood_model_runner.runners.base import StepBatch
from draftwood_strategies import create
from tests.model_runner.counting import calls_of
from tests.model_runner.drafting.costless import CostlessRunner, costless_model
from tests.model_runner.sequences import engine_of, make_sequence

STREAMS, PROMPT, STEPS, MEASURED = 16, 64, 400, 200
STRATEGIES = "trie", "recycling", "hybrid"


class Watched(CostlessRunner):
    """Notes what each step verifies and which most probable tokens are asked for."""

    def begin(self, batch: StepBatch, top_k: int, samplers: Any) -> Any:
        self.drafted, self.top_k = batch.size > batch.rows, top_k
        return super().begin(batch, top_k, samplers)


@functools.cache
def quiet_steps(name: str) -> tuple[list[int], float]:
    """Calls of each late step without a draft, in random text, and the drafts of a sequence in a step.

    The clock moves by being read: what a draft costs beside a model that costs nothing is this machine's noise.
    """
    with mock.patch.object(time, "perf_counter", itertools.count(0.0, 1e-5).__next__):
        return _quiet_steps(name)


def _quiet_steps(name: str) -> tuple[list[int], float]:
    texts = np.random.default_rng(0).integers(10, 4096, (STREAMS, 2 * STEPS + 2 * PROMPT)).astype(np.int32)
    texts[:, 0] = np.arange(STREAMS) + 100
    runner = Watched(texts)
    engine = engine_of(costless_model(runner), 16, max_running=STREAMS)
    strategy = create(name)
    sequences = [
        make_sequence(f"{text[0]}", text[:PROMPT].copy(), StopParams(2 * STEPS), strategy=strategy, max_draft_nodes=16)
        for text in texts
    ]
    for sequence in sequences:
        engine.add(sequence)
    for _ in range(STEPS):
        engine.step()
    counts, before = [], sum(one.stats.drafts for one in sequences)
    for _ in range(MEASURED):
        calls = calls_of(engine.step)
        if not runner.drafted and not runner.top_k:
            counts.append(calls)
    assert engine.running == STREAMS
    drafts = sum(one.stats.drafts for one in sequences) - before
    engine.close()
    return counts, drafts / MEASURED / STREAMS


@pytest.mark.parametrize("name", STRATEGIES)
def test_in_random_text_drafting_stands_still(name: str) -> None:
    (plain, _), (paused, drafts) = quiet_steps("none"), quiet_steps(name)
    # A paused sequence is asked whether it is, and keeps what it wrote.
    assert np.median(paused) - np.median(plain) <= 12 * STREAMS
    assert len(paused) >= MEASURED // 2
    assert drafts <= 1 / 8  # one in 16 steps at most is tried once drafts do not pay
