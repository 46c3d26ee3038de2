"""Reading traces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.replay.trace import TraceError, read_trace
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
        ("{", "line 1: not a recording"),
        ('{"prompt_ids": [1]}', "output_ids"),
        ('{"prompt_ids": [1], "output_ids": []}', "output_ids must be a list"),
        ('{"prompt_ids": [-1], "output_ids": [1]}', "prompt_ids must be a list"),
        ('{"prompt_ids": ["a"], "output_ids": [1]}', "not a recording"),
        ("[1, 2]", "not a recording"),
    ],
)
def test_a_bad_trace_names_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(line)
    with pytest.raises(TraceError, match=message) as caught:
        list(read_trace(path))
    assert "bad.jsonl" in str(caught.value)


def test_a_file_that_is_not_there_or_no_gzip_is_a_trace_error(tmp_path: Path) -> None:
    (tmp_path / "no.gz").write_text("plain")
    for path in (tmp_path / "absent.jsonl", tmp_path / "no.gz"):
        with pytest.raises(TraceError, match=path.name):
            list(read_trace(path))
