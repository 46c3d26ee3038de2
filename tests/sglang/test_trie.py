"""SGLang's own trie, compiled from its wheel: what `draftwood bench replay --peer sglang` compares with."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.sglang


def _replayed(**request: Any) -> Any:
    from tests.sglang.harness import REPOSITORY

    program = REPOSITORY / "benchmarks" / "draftwood_benchmarks" / "peers" / "sglang_replay.py"
    command = [sys.executable, "-W", "ignore", str(program)]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, timeout=120, check=True)
    return json.loads(done.stdout)


def test_it_drafts_what_it_has_seen() -> None:
    text = [(7 * i) % 501 + 1 for i in range(60)]
    recordings = [[text[:6], text[6:]]] * 2
    [cold] = _replayed(nodes=[8], known=[], recordings=recordings[:1])
    [both] = _replayed(nodes=[8], known=[], recordings=recordings)
    [known] = _replayed(nodes=[8], known=[text], recordings=recordings[:1])
    assert cold["tokens"] == cold["steps"] == 53
    assert both["steps"] - cold["steps"] < 20
    assert known["steps"] < 20
    assert _replayed(memory=True, recordings=recordings)["bytes_per_token"] >= 0
