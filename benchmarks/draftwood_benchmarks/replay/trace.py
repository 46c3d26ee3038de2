"""Traces: recorded outputs of a model, as JSON lines, gzipped or not.

Either of `prompt_ids` and `output_ids`, or what `draftwood memory export` writes: a first line with the key
`draftwood_memory`, then records of `kind` and `token_ids`. Of an export the answers are read, and the first token of
each stands for the prompt, which memories do not keep. Texts that the memory was warmed with are no outputs of a model.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from draftwood_model_runner.errors import InvalidInputError
from draftwood_strategies.draft import Int32Array

Recording = tuple[Int32Array, Int32Array]
"""A prompt int32[p] and the output that followed it int32[o], neither empty."""

TRACES_HELP = "Traces: JSON lines with prompt_ids and output_ids, or files of `draftwood memory export`; or .gz."
"""Of arguments that are traces."""
_EXPORT = "draftwood_memory"
"""Key of the first line of an exported memory."""
_PARTS = ("prompt_ids", "output_ids")


class TraceError(InvalidInputError):
    """A trace cannot be read; the message names the file, the line and the problem."""

    def __init__(self, path: Path, problem: object) -> None:
        super().__init__("FILE", path, str(problem))


def read_trace(path: Path, limit: int | None = None) -> Iterator[Recording]:
    """The first `limit` recordings of a trace.

    Raises:
        TraceError: the file cannot be read, or a line is not a recording; an export has no answer of two tokens.
    """
    return islice(_recordings(path), limit)


def _recordings(path: Path) -> Iterator[Recording]:
    exported, found = False, 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                row = _row(line, path, number)
                if number == 1 and _EXPORT in row:
                    exported = True
                elif not exported or _is_answer(row):
                    found += 1
                    yield _recording(row, exported, path, number)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(path, error) from error
    if exported and not found:
        raise TraceError(path, "the exported memory has no answer of two tokens or more")


def _row(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise TraceError(path, f"line {number}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise TraceError(path, f"line {number}: not an object")
    return row


def _is_answer(row: dict[str, Any]) -> bool:
    """Whether a record of an export is an answer with a token to draft. One without `token_ids` is for `_recording`."""
    ids = row.get("token_ids")
    return row.get("kind") == "output" and not (isinstance(ids, list) and len(ids) < 2)


def _recording(row: dict[str, Any], exported: bool, path: Path, number: int) -> Recording:
    parts = {"token_ids": row.get("token_ids")} if exported else {name: row.get(name) for name in _PARTS}
    found = [_ids(ids, name, path, number) for name, ids in parts.items()]
    prompt, output = (found[0][:1], found[0][1:]) if exported else found
    return prompt, output


def _ids(given: object, name: str, path: Path, number: int) -> Int32Array:
    try:
        ids = np.array(given, np.int32)
    except (ValueError, TypeError, OverflowError):
        ids = np.empty(0, np.int32)
    if ids.ndim != 1 or ids.size == 0 or ids.min() < 0:
        raise TraceError(path, f"line {number}: {name} must be a list of one or more ids of at least 0")
    return ids


def trace_name(path: Path) -> str:
    """The file's name without `.jsonl` and `.gz`."""
    return path.name.removesuffix(".gz").removesuffix(".jsonl")
