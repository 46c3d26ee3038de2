"""SGLang's own trie, compiled from its wheel: what `draftwood bench replay --peer sglang` compares with."""

from __future__ import annotations

import runpy
from typing import Any

import pytest

pytestmark = pytest.mark.sglang


def _engine() -> Any:
    from tests.sglang.harness import REPOSITORY

    program = REPOSITORY / "benchmarks" / "draftwood_benchmarks" / "peers" / "sglang_replay.py"
    return runpy.run_path(str(program))["Engine"]({})


def test_it_drafts_what_it_has_seen() -> None:
    text = [(7 * i) % 501 + 1 for i in range(60)]
    recordings = [[text[:6], text[6:]]] * 2
    engine = _engine()
    cold = engine.replay(8, recordings[:1])
    both = engine.replay(8, recordings)
    assert cold["tokens"] == sum(cold["steps"]) == 53
    assert both["steps"][0] == 53
    assert both["steps"][1] < 20
