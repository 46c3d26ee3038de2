"""Prompts to measure with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from draftwood_benchmarks.harness.prompts import read_prompts, split
from draftwood_benchmarks.harness.report import BenchmarkError


def test_the_bundled_questions_begin_with_the_measured_ones() -> None:
    prompts = read_prompts(None)
    assert len(prompts) == 140
    assert prompts[0].startswith("hi, i ordered the wrong size")


def test_files_hold_json_lines_of_several_kinds_or_plain_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text(
        '{"instruction": "a", "response": "x"}\n{"text": "b"}\n\n{"prompt": "c"}\n{"turns": ["d", "e"]}\n'
        '{"question": "f", "answer": "g"}\n  plain text \n',
        encoding="utf-8",
    )
    assert read_prompts(path) == ["a", "b", "c", "d", "f", "plain text"]


def test_a_file_without_prompts_says_where(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    with pytest.raises(BenchmarkError, match="prompts"):
        read_prompts(path)
    for content, message in (
        ("", "holds no lines"),
        ('hello\n{"instruction"', "line 2: not JSON"),
        ('{"answer": "x"}', "line 1: no text under any of instruction, text"),
        ('{"turns": []}', "line 1: no text"),
        ('{"prompt": 3}', "line 1: no text"),
    ):
        path.write_text(content)
        with pytest.raises(BenchmarkError, match=message):
            read_prompts(path)


def test_the_measured_prompts_and_those_to_warm_up_with_are_apart() -> None:
    prompts = [np.full(4, number, np.int32) for number in range(10)]
    measured, others = split(prompts, 3, 5)
    assert [len(measured), len(others)] == [3, 5]
    assert all(np.array_equal(a, b) for a, b in zip(measured + others, prompts, strict=False))
    with pytest.raises(BenchmarkError, match="only 10"):
        split(prompts, 3, 8)
