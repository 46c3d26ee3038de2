"""What SGLang's `/metrics` shows of our drafts, with its own process, folder and handler, and what fails there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.sglang.process import HANGING, asked, scheduler_process

pytestmark = pytest.mark.sglang

Scrape = Callable[[], dict[str, float]]


@pytest.fixture
def scrape(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Scrape]:
    """The figures of ours in the answer of SGLang's handler, each summed over its labels."""
    from sglang.srt.utils import common
    from starlette.applications import Starlette
    from starlette.testclient import TestClient

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "")
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR")
    common.set_prometheus_multiproc_dir()  # before its scheduler starts, which inherits it
    app = Starlette()
    common.add_prometheus_middleware(app)
    client = TestClient(app)

    def scraped() -> dict[str, float]:
        found: dict[str, float] = {}
        for name, value in re.findall(r"^(draftwood\w+)(?:\{.*\})? (\S+)$", client.get("/metrics").text, re.MULTILINE):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    yield scraped
    common.prometheus_multiproc_dir.cleanup()


def _until(scrape: Scrape, name: str, value: float) -> None:
    ends = time.monotonic() + 60.0
    while scrape().get(name) != value:
        assert time.monotonic() < ends, scrape()
        time.sleep(0.1)


def test_sglangs_metrics_show_drafts_and_what_fails(scrape: Scrape) -> None:
    with scheduler_process() as pipe:
        assert asked(pipe, "answer", "1", {}) == 0
        assert asked(pipe, "answer", "2", {}) > 20
        _until(scrape, "draftwood_sequences_total", 2)
        found = scrape()
        assert found["draftwood_draft_accepted_tokens_total"] >= 0
        assert (found["draftwood_drafting_up"], found["draftwood_store_up"]) == (1, 1)
        assert found["draftwood_draft_disabled_total"] == 0
        # The worker steps on the main thread of its process, where a strategy that hangs can be interrupted.
        for name in ("3", "4"):
            asked(pipe, "answer", name, {"draftwood_strategy": HANGING})
        _until(scrape, "draftwood_draft_disabled_total", 2)
        assert asked(pipe, "answer", "5", {}) > 20
        asked(pipe, "break_drafting")
        assert asked(pipe, "answer", "6", {}) == 0
        _until(scrape, "draftwood_drafting_up", 0)
        assert asked(pipe, "answer", "7", {}) == 0


def test_sglangs_metrics_show_that_drafts_could_not_be_opened(scrape: Scrape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWOOD_STORE", "nonsense://")
    with scheduler_process() as pipe:
        assert asked(pipe, "answer", "1", {}) == 0
        assert scrape() == {"draftwood_drafting_up": 0}


def test_sglangs_own_metrics_are_kept() -> None:
    """prometheus_client chooses at its import whether a process writes into the folder, which SGLang names later."""
    program = """
import os
from tests.sglang import conftest
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.utils import common
common.set_prometheus_multiproc_dir()
from prometheus_client import Counter
Counter("its_own", "").inc()
print(len(os.listdir(os.environ["PROMETHEUS_MULTIPROC_DIR"])))
"""
    environ = {name: value for name, value in os.environ.items() if name != "PROMETHEUS_MULTIPROC_DIR"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], env=environ, capture_output=True, text=True)
    assert done.stdout.split()[-1:] == ["1"], done.stderr
