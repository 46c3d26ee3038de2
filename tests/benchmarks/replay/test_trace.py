"""Reading traces."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from draftwood_benchmarks.replay.trace import TraceError, read_trace
from tests.benchmarks.replay.traces import write_trace


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_traces_are_read_up_to_the_limit(tmp_path: Path, name: str) -> None:
    path = write_trace(tmp_path / name, rows=5)
    assert len(list(read_trace(path))) == 5
    prompt, output = list(read_trace(path, limit=2))[1]
    assert prompt.tolist() == [1, 3]
    assert output.dtype == np.int32


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not JSON"),
        ('{"prompt_ids": [1]}', "output_ids"),
        ('{"prompt_ids": [1], "output_ids": []}', "output_ids must be a list"),
        ('{"prompt_ids": [-1], "output_ids": [1]}', "prompt_ids must be a list"),
        ('{"prompt_ids": ["a"], "output_ids": [1]}', "prompt_ids must be a list"),
        ('{"prompt_ids": [1], "output_ids": [99999999999]}', "output_ids must be a list"),
        ("[1, 2]", "not an object"),
        ('{"draftwood_memory": 1}\n{"kind": "output"}', "line 2: token_ids must be a list"),
        ('{"draftwood_memory": 1}\n{"kind": "corpus", "token_ids": [1, 2]}', "no answer of two tokens"),
        ('{"draftwood_memory": 1}\n', "no answer of two tokens"),
    ],
)
def test_a_bad_trace_names_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(line)
    with pytest.raises(TraceError, match=message) as caught:
        list(read_trace(path))
    assert "bad.jsonl" in str(caught.value)


def test_an_exported_memory_is_a_trace_of_its_answers(tmp_path: Path) -> None:
    path = tmp_path / "memory.jsonl"
    records = [("output", [5, 6, 7]), ("corpus", [1, 2]), ("output", [9]), ("output", [8, 9])]
    lines = [{"draftwood_memory": 1, "model": "m"}, *({"kind": kind, "token_ids": ids} for kind, ids in records)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = [(prompt.tolist(), output.tolist()) for prompt, output in read_trace(path)]
    assert found == [([5], [6, 7]), ([8], [9])]
    assert len(list(read_trace(path, limit=1))) == 1


def test_a_file_that_is_not_there_or_no_gzip_is_a_trace_error(tmp_path: Path) -> None:
    (tmp_path / "no.gz").write_text("plain")
    for path in (tmp_path / "absent.jsonl", tmp_path / "no.gz"):
        with pytest.raises(TraceError, match=path.name):
            list(read_trace(path))
