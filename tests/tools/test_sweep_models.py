"""The sweep over model families: what it finds for some, and that the committed file is what the command reads."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from draftwood_model_runner.loading.supported_models import FILE, families, trial_conditions
from draftwood_service.models_command import models
from tools.model_sweep.families import FAMILIES, small_model
from tools.model_sweep.trial import PROMPTS, RUNNERS, try_runner


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    "family",
    ["llama", "deepseek_v3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mistral", "stablelm"))],
)
def test_drafted_answers_are_those_of_transformers(family: str, runner: str) -> None:
    result = try_runner(small_model(family), runner)
    assert result["supported"], result
    assert result["identical"] == result["answers"] == len(PROMPTS)
    assert result["accepted_tokens"] > 100


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("moshi", "with a KV cache than without"),
        ("phimoe", "beyond sliding_window"),
        ("bloom", "code of its own"),
    ],
)
def test_a_refusal_says_why(family: str, reason: str) -> None:
    result = try_runner(small_model(family), "torch")
    assert not result["supported"]
    assert reason in result["reason"]


def test_the_file_has_every_family() -> None:
    assert {family.family: family.models for family in families()} == FAMILIES
    assert {"transformers", "torch", "openvino"} <= trial_conditions().keys()
    for family in families():
        assert set(family.runners) <= set(RUNNERS)
        assert bool(family.tested) == bool(family.runners)
        assert len(family.runners) == len(RUNNERS) or family.reason


def test_the_command_prints_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert models(["--json"]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [entry["family"] for entry in printed["families"]] == sorted(FAMILIES)
    assert printed["tested"] == json.loads(FILE.read_text())["tested"]
    assert models([]) == 0
    assert "deepseek_v3" in capsys.readouterr().out
