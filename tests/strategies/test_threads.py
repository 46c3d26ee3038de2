"""Rows divided among threads: all of them, in order, and whatever fails is heard of."""

from __future__ import annotations

import signal
import threading
from functools import partial

import numpy as np
import pytest
import torch

from draftwood_model_runner.sampling.most_probable import most_probable
from draftwood_strategies import threads as row_threads
from draftwood_strategies.threads import LEAST_NUMBERS, draft_in_threads, in_threads


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_error_is_raised_when_all_have_ended(bad: int) -> None:
    ended = []

    def call(number: int) -> None:
        if number == bad:
            raise ValueError(number)
        ended.append(number)

    with pytest.raises(ValueError, match=str(bad)):
        in_threads([partial(call, i) for i in range(3)], 3)
    assert len(ended) == 2


@pytest.mark.parametrize(("sequences", "cpus", "groups"), [(0, 8, 1), (31, 8, 1), (33, 8, 2), (128, 4, 4), (128, 1, 1)])
def test_many_sequences_are_drafted_for_in_groups(
    sequences: int, cpus: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_threads, "_usable_cpus", lambda: cpus)
    together = threading.Barrier(groups, timeout=60)

    def draft(rows: range) -> list[int]:
        together.wait()
        return [*rows]

    found = draft_in_threads(np.full(sequences, 64, np.int32), draft)
    assert len(found) == groups
    assert [i for rows, _ in found for i in rows] == [*range(sequences)]
    assert all([*rows] == drafted for rows, drafted in found)


def test_an_interrupted_call_ends_after_its_threads() -> None:
    """As when the watchdog interrupts a draft that takes too long."""
    begun, goes_on, ended = threading.Event(), threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        goes_on.wait(10)
        ended.set()

    def quick() -> None:
        begun.wait(10)
        signal.setitimer(signal.ITIMER_REAL, 0.2)  # when this thread waits for the other

    def interrupt(*_: object) -> None:
        threading.Timer(0.05, goes_on.set).start()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            in_threads([quick, slow], 2)
        assert ended.is_set()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_the_most_probable_tokens_are_the_same_with_threads() -> None:
    rows, vocab = 13, 50_000
    assert rows * vocab > LEAST_NUMBERS
    scores = np.random.default_rng(1).integers(-500, 500, (rows, vocab))
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.from_numpy(scores).to(dtype)
        alone, together = most_probable(logits, 8), most_probable(logits, 8, 3)
        assert (alone[0] == together[0]).all()
        assert alone[1] is not None
        assert together[1] is not None
        assert (alone[1] == together[1]).all()
