"""A strategy beside SGLang's trie; `make test-sglang` replays over the trie itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from draftwood_benchmarks.peers.process import PeerError
from draftwood_benchmarks.peers.sglang_replay import _accepted
from draftwood_benchmarks.replay import peer_program, sglang_trie
from draftwood_benchmarks.replay.sglang_trie import beside_sglang

TRACE = [(np.arange(1, 6, dtype=np.int32), np.arange(6, 60, dtype=np.int32))] * 4


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peer_program, "ENVIRONMENTS", tmp_path)
    with pytest.raises(PeerError, match="SGLang is not installed; `make peers` does that"):
        beside_sglang("trie", {}, {"counting": TRACE}, [8])


def test_rows_compare_equally_many_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(peer: str, module: str, request: dict[str, object], recordings: object) -> object:
        asked.append(request)
        return (
            {"bytes_per_token": 3000.0} if "memory" in request else [{"steps": 20, "tokens": 53, "draft_us": 9.0}] * 2
        )

    monkeypatch.setattr(sglang_trie, "installed", lambda peer: True)
    monkeypatch.setattr(sglang_trie, "answer_of", answer)
    rows = beside_sglang("trie", {}, {"counting": TRACE}, [2, 16])
    assert [(row.known, row.budget) for row in rows] == [("nothing", 2), ("nothing", 16), ("half", 2), ("half", 16)]
    assert [len(request["known"]) for request in asked[1:]] == [0, 2]  # type: ignore[arg-type]
    narrow, wide = rows[2:]
    assert narrow.acceptance_length == pytest.approx(2.0, abs=0.05)
    assert narrow.peer_acceptance_length == 2.65
    assert 2.0 < wide.acceptance_length <= 16.0


def test_the_longest_path_is_accepted() -> None:
    mask = np.array([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0, 1, 1]])
    assert _accepted([9, 1, 2, 3, 4], mask, [3, 4, 5]) == 2
    assert _accepted([9, 1, 2, 3, 4], mask, [1, 2]) == 2
    assert _accepted([9, 1, 2, 3, 4], mask, [2, 1]) == 0
