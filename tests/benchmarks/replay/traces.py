"""Trace files for tests."""

from __future__ import annotations

import gzip
import json
from pathlib import Path


def write_trace(path: Path, rows: int) -> Path:
    text = "".join(
        json.dumps({"prompt_ids": [1, i], "output_ids": [*range(10, 40), i]}) + "\n" for i in range(2, 2 + rows)
    )
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path
