"""`draftwood bench quality`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from draftwood_benchmarks.commands import bench
from draftwood_benchmarks.harness.report import BenchmarkError
from draftwood_benchmarks.quality import Scores, read_texts, rows_of
from tests.model_runner.families import reference, served

QUESTION, ANSWER = "where is my order", "I'm sorry to hear that. Please check the {{Order Number}}."


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_likelihoods_are_those_of_the_model(weights: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, report = tmp_path / "text.jsonl", tmp_path / "quality.json"
    too_long = "x " * 3000
    lines = [{"instruction": QUESTION, "response": answer} for answer in (ANSWER, too_long)]
    text.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["--weights", weights, "--threads", "1", "--text", str(text), "--json", str(report)]
    assert bench(["quality", *arguments]) == 0
    plain, quantized = json.loads(report.read_text())["rows"]
    tokenizer = served("bundled").tokenizer
    question = tokenizer.encode_chat([{"role": "user", "content": QUESTION}])
    answer = [*tokenizer.encode(ANSWER).tolist(), *served("bundled").eos_token_ids]
    ids = torch.tensor([[*question.tolist(), *answer]])
    with torch.inference_mode():
        nats = reference("bundled")(ids, labels=ids.masked_fill(torch.arange(ids.shape[1]) < question.size, -100)).loss
    assert plain["tokens"] == quantized["tokens"] == len(answer)
    assert plain["nats_per_token"] == pytest.approx(float(nats), abs=1e-4)
    assert (plain["nats_more"], plain["agreement"]) == (0.0, 1.0)
    assert 0.0 < abs(quantized["nats_more"]) < 0.1
    assert f"float32 with {weights} weights" in capsys.readouterr().out


def test_rows_compare_with_the_first_kind_of_weights() -> None:
    first = Scores(np.array([1.0, 2.0, 3.0, 2.0]), np.array([1, 2, 3, 4], np.int32))
    second = Scores(np.array([1.5, 2.5, 3.5, 1.5]), np.array([1, 2, 3, 9], np.int32))
    rows = rows_of({"as-is": first, "int8": second})
    assert [row["nats_per_token"] for row in rows] == [2.0, 2.25]
    assert rows[0]["perplexity"] == round(math.exp(2.0), 4)
    assert (rows[1]["nats_more"], rows[1]["agreement"]) == (0.25, 0.75)
    assert rows[1]["error"] == round(math.sqrt(0.1875 / 4), 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no lines"),
        ('{"instruction": "a"}\n', "line 1: no JSON object with the texts `instruction` and `response`"),
        ('{"instruction": "a", "response": "b"}\n[1]\n', "line 2"),
        ('{"instruction": "a", "response": 1}\n', "line 1"),
    ],
)
def test_a_file_that_is_no_text_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text(text)
    with pytest.raises(BenchmarkError, match=message):
        read_texts(path)
