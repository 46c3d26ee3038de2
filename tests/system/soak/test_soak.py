"""A short soak of a real service."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftwood_benchmarks.commands import bench
from tests.system.soak.run import ROUNDS
from tests.system.soak.traffic import KINDS

MEMORY_BOUND = 64
"""MiB in the second half of the time, some 100 requests: a leak of 640 KiB per request, a fifth of the KV memory of a
sequence. A run of half an hour finds 2 KiB per request."""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_short_soak_loses_no_slot_and_nothing_that_is_large(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, picture = tmp_path / "soak.json", tmp_path / "soak.png"
    arguments = ["--duration", "14", "--max-context", "512", "--threads", "1"]
    arguments += ["--memory-bound", str(MEMORY_BOUND)]
    status = bench(["soak", *arguments, "--json", str(report), "--plot", str(picture)])
    assert status == 0, capsys.readouterr().err
    found = json.loads(report.read_text())
    assert set(found["rows"][0]) == {"seconds", "rss_mib", "threads", "fds", "requests"}
    assert max(row["requests"] for row in found["rows"]) > 4
    assert found["free_places"] == [found["places"]] * ROUNDS
    assert found["failures"] == []
    assert {growth["name"] for growth in found["growth"]} == {"rss_mib", "threads", "fds"}
    assert set(found["requests"]) == KINDS.keys()
    assert picture.read_bytes().startswith(b"\x89PNG")
