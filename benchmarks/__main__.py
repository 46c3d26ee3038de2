"""`python -m benchmarks` at the root of a checkout: `draftwood bench` where nothing of Draftwood is installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_FOLDERS = ("strategies", "memory", "tenants", "model_runner", "service", "benchmarks", "clients/python", "protos")

if __name__ == "__main__":
    paths = [str(_ROOT / folder) for folder in _FOLDERS]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    os.execv(sys.executable, [sys.executable, "-m", "draftwood_benchmarks", *sys.argv[1:]])
