"""OpenVINO counts no users: nothing leaves the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_importing_the_runner_sends_and_keeps_nothing(tmp_path: Path) -> None:
    code = "import sys, draftwood_model_runner.runners.openvino.factory; print(sys.modules['openvino_telemetry'])"
    environment = {**os.environ, "HOME": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout == "None\n"
    assert not (tmp_path / "intel").exists()
