"""Fixtures of the benchmarks' tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from draftwood_benchmarks.peers import process
from tests.benchmarks.peers.fake import UsePeer


@pytest.fixture
def use_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UsePeer:
    def use(program: str) -> None:
        script = tmp_path / "peer.py"
        script.write_text(program)
        monkeypatch.setattr(process, "command_of", lambda name, module: [sys.executable, str(script)])

    return use
