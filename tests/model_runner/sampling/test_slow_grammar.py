"""Masks that take long are computed beside the steps: nobody else waits for them, and they change no token."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

import draftwood_strategies
from draftwood_model_runner.engine import Engine
from draftwood_model_runner.errors import InvalidValueError
from draftwood_model_runner.request import GrammarKind, SamplingParams, StopParams
from draftwood_model_runner.sampling import grammar, metadata
from draftwood_model_runner.sampling.grammar import GrammarState
from draftwood_model_runner.sampling.metadata import Adjustments, SamplingTensors, SequenceSampling, TokenMasks
from draftwood_model_runner.sequence import Sequence, SequenceState
from tests.model_runner.families import served
from tests.model_runner.sampling.test_grammar import GRAMMARS, answer, expected, prompt
from tests.model_runner.sequences import engine_of, make_sequence, run

AMBIGUOUS = "start: e\ne: e e | /[a-z ]/"
"""The work for a mask grows with the cube of what is written."""


class GatedMatcher:
    """A matcher with slow masks: none is computed while the gate is closed, and then `held` is set.

    Attributes:
        threads: names of those that compute masks.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self.gate = threading.Event()
        self.gate.set()
        self.held = threading.Event()
        self.threads: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def compute_bitmask(self) -> Any:
        self.threads.add(threading.current_thread().name)
        if not self.gate.is_set():
            self.held.set()
            assert self.gate.wait(30)
        return self._matcher.compute_bitmask()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mask counts as slow."""
    monkeypatch.setattr(grammar, "_SLOW_SECONDS", -1.0)


@pytest.fixture
def engine() -> Engine:
    return engine_of(served("bundled"), 24, max_running=3)


def gated(engine: Engine) -> tuple[Sequence, GatedMatcher]:
    """A sequence in the engine that has written one token."""
    state = served("bundled").grammars.compile(GrammarKind.REGEX, GRAMMARS[GrammarKind.REGEX])
    assert isinstance(state, GrammarState)
    matcher = GatedMatcher(state._matcher)
    state._matcher = matcher  # type: ignore[assignment]
    state._quick_to_come = grammar._QUICK_MASKS  # as after a slow mask
    sequence = make_sequence("slow", prompt(), StopParams(20), grammar=state, max_draft_nodes=8)
    engine.add(sequence)
    return sequence, matcher


def run_until(engine: Engine, until: Callable[[], bool]) -> None:
    while not until():
        engine.step()
        engine.check()


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("kind", GRAMMARS)
def test_slow_masks_change_no_token(engine: Engine, kind: GrammarKind) -> None:
    wanted = expected(kind, 80)
    for nodes in (0, 24):
        assert answer(engine, kind, draftwood_strategies.create("hybrid"), nodes)[0].output == wanted
    sampled = [answer(engine, kind, None, nodes, temperature=1.0, seed=5)[0].output for nodes in (0, 24)]
    assert sampled[0] == sampled[1] != wanted


@pytest.mark.usefixtures("slow")
def test_nobody_waits_for_anothers_mask(engine: Engine) -> None:
    sequence, matcher = gated(engine)
    run_until(engine, lambda: bool(sequence.output))
    matcher.gate.clear()
    run_until(engine, matcher.held.is_set)
    written = len(sequence.output)
    other = make_sequence("other", prompt(), StopParams(15, ignore_eos=True))
    engine.add(other)
    for number in range(1, 16):
        assert [output.sequence for output in engine.step()] == [other]
        assert len(other.output) == number
    assert len(sequence.output) == written
    assert engine.step() == []
    assert engine.has_work
    matcher.gate.set()
    run_until(engine, lambda: not engine.has_work)
    assert sequence.output == expected(GrammarKind.REGEX, 80)[:20]
    assert any(name.startswith("mask") for name in matcher.threads)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("end", ["cancel", "pause", "close"])
def test_a_sequence_may_end_or_pause_while_its_mask_is_computed(engine: Engine, end: str) -> None:
    sequence, matcher = gated(engine)
    run_until(engine, lambda: bool(sequence.output))
    matcher.gate.clear()
    run_until(engine, matcher.held.is_set)
    if end == "close":
        engine.close()
    else:
        getattr(engine, end)(sequence)
    engine.check()
    assert not engine.has_work
    if end == "pause":
        engine.resume(sequence)
        engine.step()
        matcher.gate.set()
        run_until(engine, lambda: not engine.has_work)
        assert sequence.output == expected(GrammarKind.REGEX, 80)[:20]
    matcher.gate.set()
    assert sequence.state is SequenceState.FINISHED


def test_drafts_end_at_a_slow_mask_and_come_back_after_quick_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    state = served("bundled").grammars.compile(GrammarKind.REGEX, "[a-z]{200}")
    scores = np.zeros(served("bundled").vocab_size, np.float32)

    def write() -> None:
        scores[:] = 0.0
        state.mask(scores)
        state.accept(int(scores.argmax()))

    with ThreadPoolExecutor(1) as threads:
        write()
        state.prepare(threads)
        assert (state.slow, state.pending) == (False, None)
        monkeypatch.setattr(grammar, "_SLOW_SECONDS", -1.0)
        write()
        assert state.slow
        monkeypatch.setattr(grammar, "_SLOW_SECONDS", math.inf)
        for _ in range(grammar._QUICK_MASKS):
            assert state.slow
            state.prepare(threads)
            assert state.pending is not None
            state.pending.result()
            write()
        assert not state.slow


@pytest.mark.parametrize("slow_seconds", [-1.0, math.inf])
def test_the_work_for_a_token_is_bounded(engine: Engine, slow_seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a bound that is much lower than llguidance's own, a mask of this grammar takes most of a second,
    beside the steps and within them."""
    monkeypatch.setattr(grammar, "_SLOW_SECONDS", slow_seconds)
    state = served("bundled").grammars.compile(GrammarKind.LARK, AMBIGUOUS)
    sequence = make_sequence("r", prompt(), StopParams(200), grammar=state)
    [finish] = [output.finish for output in run(engine, sequence) if output.finish]
    assert isinstance(finish.error, InvalidValueError)
    assert finish.error.field == "format"
    assert "limit 5000" in finish.error.allowed
    assert 3 < len(sequence.output) < 60


def test_masks_of_several_sequences_are_found_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "usable_cpus", lambda: 4)
    together = threading.Barrier(4, timeout=30)

    def masks(sequence: int) -> TokenMasks:
        together.wait()  # passes only if four are found at the same time
        return TokenMasks(np.array([0, -2], np.int32), np.full((1, 2), sequence, np.int32))

    none = np.zeros(0, np.int32)
    adjustments = Adjustments(none, none, none.astype(np.float32), none)
    sequences = [SequenceSampling(SamplingParams(), 0, adjustments, partial(masks, i)) for i in range(8)]
    offsets = np.arange(9, dtype=np.int32) * 2
    tensors = SamplingTensors.of(sequences, offsets[:-1], offsets[1:])
    assert tensors.masks.tolist() == [[i, i] for i in range(8)]
    assert tensors.row_masks.tolist() == [n for i in range(8) for n in (i, -2)]
