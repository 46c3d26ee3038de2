"""`draftwood experiment replay`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from draftwood_benchmarks.replay import experiment, read_trace, replay
from draftwood_benchmarks.replay.experiment import ArmSpec, interval, paired, steps_of
from draftwood_strategies import create
from tests.benchmarks.conftest import write_trace


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "mine.jsonl", rows=6)


def test_steps_per_answer_are_those_of_one_replay(trace: Path) -> None:
    recordings = list(read_trace(trace))
    steps = steps_of(ArmSpec("a", "trie", {}), recordings, partial(replay, budget=16))[:, 0]
    assert steps.sum() == replay(create("trie"), recordings, 16).steps
    assert steps[0] > 3 * steps[1]  # the first answer is drafted from nothing


def test_rows_compare_with_the_first_arm() -> None:
    tokens = np.full(50, 60)
    specs = [ArmSpec("a", "none", {}), ArmSpec("b", "trie", {})]
    control, treatment = np.tile([[60, 0], [30, 0]], (25, 1)), np.tile([[30, 0], [15, 0]], (25, 1))
    first, second = paired(specs, [control, treatment], tokens)
    assert (first["steps"], first["change"]) == (2250, None)
    assert first["acceptance_length"] == pytest.approx(4 / 3)
    # The answers differ, their ratios do not: pairing leaves no noise.
    assert [second[name] for name in ("change", "low", "high")] == pytest.approx([1.0] * 3)


@pytest.mark.system
def test_intervals_cover_the_true_change() -> None:
    """95% of 100; 84 or fewer have a probability of 0.0001 at 95% and of 0.01 at 92%."""
    random = np.random.default_rng(1)
    covered = 0
    for seed in range(100):
        control = random.integers(20, 100, 120)
        treatment = random.binomial(control, 0.8)
        low, high = interval(control, treatment, seed)
        covered += low <= 0.25 <= high
    assert covered > 84


def test_answers_without_a_step_change_nothing() -> None:
    control, treatment = np.array([60, 30, 44]), np.array([30, 15, 40])
    padded = [np.concatenate([steps, np.zeros(50, np.int64)]) for steps in (control, treatment)]
    assert interval(padded[0], padded[1]) == interval(control, treatment)


def test_the_command_prints_a_table_or_json(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arms = ["--arm", "off:none", "--arm", "short:trie,branch_length=1,learn=both", "--arm", "long:hybrid"]
    assert experiment.replay([str(trace), *arms, "--limit", "4"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "4 recorded answers, 120 tokens, 16 draft nodes a step" in shown
    assert "long reads the model's most probable tokens" in shown
    assert experiment.replay([str(trace), *arms, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    off, short, long = printed["rows"]
    assert (off["arm"], off["steps"], off["change"]) == ("off", 180, None)
    assert 0 < short["low"] <= short["change"] < long["change"]
    assert printed["without_model"] == ["long"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arm", "a:trie"], "--arm: two or more arms are needed"),
        (["--arm", "a:trie", "--arm", "a:none"], "--arm a: two arms have this name"),
        (["--arm", "trie", "--arm", "b:none"], "--arm trie: it must be NAME:STRATEGY[,OPTION=VALUE]..."),
        (["--arm", "a:trie,deep", "--arm", "b:none"], "--arm a:trie,deep: it must be NAME"),
        (["--arm", "a:tire", "--arm", "b:none"], "no strategy is named 'tire'"),
        (["--arm", "a:trie,branch_length=0", "--arm", "b:none"], "--arm a: "),
        (["--arm", "a:trie,depth=3", "--arm", "b:none"], "depth"),
    ],
)
def test_wrong_arms_are_one_line_and_status_2(
    trace: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert experiment.replay([str(trace), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_files_without_steps_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arms = ["--arm", "a:trie", "--arm", "b:none"]
    assert experiment.replay([str(tmp_path / "absent.jsonl"), *arms]) == 2
    assert "absent.jsonl" in capsys.readouterr().err
    short = tmp_path / "short.jsonl"
    short.write_text('{"prompt_ids": [1], "output_ids": [2]}\n')
    assert experiment.replay([str(short), *arms]) == 1
    assert "no recorded output has a second token" in capsys.readouterr().err
