"""Traces: recorded outputs of a model, as JSON lines, gzipped or not, of `prompt_ids` and `output_ids`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from strategies.draft import Int32Array

Recording = tuple[Int32Array, Int32Array]
"""A prompt int32[p] and the output that followed it int32[o], neither empty."""


class TraceError(ValueError):
    """A trace cannot be read; the message names the file, the line and the problem."""


def read_trace(path: Path, limit: int | None = None) -> Iterator[Recording]:
    """The first `limit` recordings of a trace.

    Raises:
        TraceError: the file cannot be read, or a line is not a recording.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and number > limit:
                    return
                yield _recording(line, path, number)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {error}") from error


def _recording(line: str, path: Path, number: int) -> Recording:
    try:
        row = json.loads(line)
        prompt, output = np.array(row["prompt_ids"], np.int32), np.array(row["output_ids"], np.int32)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise TraceError(f"{path}, line {number}: not a recording ({error!r})") from error
    for name, ids in (("prompt_ids", prompt), ("output_ids", output)):
        if ids.ndim != 1 or ids.size == 0 or ids.min() < 0:
            raise TraceError(f"{path}, line {number}: {name} must be a list of one or more ids of at least 0")
    return prompt, output


def trace_name(path: Path) -> str:
    """The file's name without `.jsonl` and `.gz`."""
    return path.name.removesuffix(".gz").removesuffix(".jsonl")
