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
        command_of = process.command_of

        def command(name: str, module: str) -> list[str]:
            return [sys.executable, str(script)] if name in process.DRAFTS else command_of(name, module)

        monkeypatch.setattr(process, "command_of", command)

    return use
