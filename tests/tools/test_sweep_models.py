"""The sweep over model families: what it finds for some of each kind, and that the command prints its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwood_service.models.command import models
from draftwood_service.models.families import FILE, families
from tools.model_sweep.families import FAMILIES, NO_TEXT, small_model
from tools.model_sweep.table import docs_table, entry, share
from tools.model_sweep.trial import PROMPTS, RUNNERS, try_runner
from tools.sweep_models import try_family

_DOCS = Path(__file__).parent.parent.parent / "docs" / "models.md"
_slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("family", "runner", "result"),
    [
        ("llama", "torch", "trees"),
        ("llama", "openvino", "trees"),
        ("bart", "torch", "trees"),
        ("bart", "openvino", "trees"),
        ("roberta", "torch", "trees"),
        ("bloom", "torch", "chains"),
        ("falcon", "torch", "trees"),
        ("deepseek_v32", "torch", "trees"),
        pytest.param("deepseek_v4", "torch", "chains", marks=_slow),
        pytest.param("longcat_flash", "torch", "trees", marks=_slow),
        pytest.param("llama4_text", "torch", "chains", marks=_slow),
        pytest.param("mistral", "openvino", "chains", marks=_slow),
    ],
)
def test_drafted_answers_are_those_of_transformers(family: str, runner: str, result: str) -> None:
    found = try_runner(small_model(family), runner)
    assert found["result"] == result, found
    assert found["identical"] == found["answers"] == len(PROMPTS)
    assert found["accepted"] > 50
    assert found["tokens"] > 100


@pytest.mark.parametrize(
    ("family", "reason"),
    [("openai-gpt", "in a cache of transformers"), pytest.param("moshi", "set max_context", marks=_slow)],
)
def test_a_refusal_says_why(family: str, reason: str) -> None:
    found = try_runner(small_model(family), "torch")
    assert found["result"] == "refused"
    assert reason in found["reason"]


def test_a_family_without_text_is_not_tried() -> None:
    assert try_family("musicgen", "torch")["reason"] == NO_TEXT["musicgen"]


def test_an_entry_says_what_each_runner_does_and_why_not() -> None:
    found = entry(
        "falcon", {"torch": {"result": "trees", "kind": "attention"}, "openvino": {"result": "refused", "reason": "r"}}
    )
    assert (found["torch"], found["openvino"], found["reason"]) == ("trees", "refused", "r")
    assert entry("falcon", {})["reason"] == "torch: not tried; openvino: not tried"
    assert share([found]) == "of 1 families: torch 1 (100%), openvino 0 (0%)"


def test_the_file_has_every_family_and_the_docs_its_table() -> None:
    entries = families()
    assert [family.name for family in entries] == list(FAMILIES)
    for family in entries:
        assert family.kind in ("attention", "hybrid", "recurrent")
        assert {getattr(family, runner) for runner in RUNNERS} <= {"trees", "chains", "refused"}
        assert family.reason or "refused" not in (family.torch, family.openvino)
    text = _DOCS.read_text()
    assert docs_table(text, json.loads(FILE.read_text())["families"]) == text


def test_the_command_prints_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert models(["--families", "--json"]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert printed == json.loads(FILE.read_text())
    assert models(["--families"]) == 0
    assert "deepseek_v3" in capsys.readouterr().out
