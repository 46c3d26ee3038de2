"""`draftwood bench lossless`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftwood_benchmarks import lossless
from draftwood_benchmarks.commands import bench
from draftwood_benchmarks.harness.answers import generate
from draftwood_benchmarks.harness.report import BenchmarkError
from draftwood_benchmarks.lossless import Difference
from draftwood_model_runner.sampling.token_sampler import TokenSampler
from tests.benchmarks.conftest import ReportOf
from tests.model_runner.families import greedy, reference

PROMPT = (3, 1, 4, 1, 5)
ARGUMENTS = ("--threads", "1", "--max-tokens", "12", "--together", "2", "--dtype", "float32")


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("where is my order 5521?\nhow do I cancel order 1 and return what came with it?\nhello\n")
    return path


def test_every_way_to_run_the_model_is_compared(questions: Path, report_of: ReportOf) -> None:
    rows = report_of("lossless", *ARGUMENTS, "--prompts", str(questions))["rows"]
    assert [(row["engine"], row["strategy"], row["together"]) for row in rows] == [
        ("transformers", "none", 2),
        ("draftwood", "none", 1),
        ("draftwood", "none", 2),
        ("draftwood", "hybrid", 1),
        ("draftwood", "hybrid", 2),
    ]
    assert all(row["identical"] == row["answers"] == 3 and row["tokens"] > 12 for row in rows)
    assert all(row["largest_gap"] is None and row["differences_per_1000_tokens"] == 0.0 for row in rows)


def test_an_engine_that_writes_other_tokens_ends_the_command(
    questions: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def least_probable(self: TokenSampler, *args: Any, **kwargs: Any) -> int:
        return 7

    monkeypatch.setattr(TokenSampler, "follows_predictions", False)
    monkeypatch.setattr(TokenSampler, "sample", least_probable)
    assert bench(["lossless", *ARGUMENTS, "--prompts", str(questions), "--limit", "2"]) == 1
    assert "which is no rounding" in capsys.readouterr().err


def test_a_difference_is_measured_at_its_first_token() -> None:
    module, prompt = reference("llama"), np.array(PROMPT, np.int32)
    expected = greedy("llama", PROMPT, 6)
    assert lossless.difference(module, prompt, expected, list(expected)) is None
    other = (expected[3] + 1) % 256
    found = lossless.difference(module, prompt, expected, [*expected[:3], other, 0, 0])
    with torch.inference_mode():
        logits = module(torch.tensor([[*PROMPT, *expected[:3]]])).logits[0, -1]
    assert found is not None
    assert found.at == 3
    assert found.gap == pytest.approx(float((logits[expected[3]] - logits[other]) / logits.abs().max()), rel=1e-5)
    with pytest.raises(BenchmarkError, match="ends after 2 tokens"):
        lossless.difference(module, prompt, expected, expected[:2])


def test_prompts_in_one_batch_are_answered_as_alone() -> None:
    prompts = [np.array(prompt, np.int32) for prompt in (PROMPT, (7, 2))]
    answers = generate(reference("llama"), prompts, 6)
    assert answers == [greedy("llama", prompt, 6) for prompt in (PROMPT, (7, 2))]
    assert lossless.until_end([5, 6, 7, 6], frozenset({6})) == [5, 6]
    assert lossless.until_end([5, 6], frozenset({7})) == [5, 6]


def test_rates_count_tokens_up_to_the_first_difference() -> None:
    found = lossless.rates([[0] * 93] * 4, [Difference(3, 0.01), None, Difference(9, 0.03), None])
    assert (found["answers"], found["identical"], found["tokens"], found["largest_gap"]) == (4, 2, 200, 0.03)
    assert found["differences_per_1000_tokens"] == 10.0
