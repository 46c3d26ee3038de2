"""The fingerprint of a checkpoint, as the server computes it of the loaded model, from its files alone.

Engines split and join weights as they load them, so their modules have no fingerprint that others share. A checkpoint
whose weights transformers itself joins as it loads them (experts, in some families) has another one here than in the
server; its memories are then shared among plug-ins only.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_ELEMENTS = 16
_SMALLEST = 2.0**-14
_KINDS: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "BF16": np.uint16}
_BUFFERS = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
"""Ends of names that checkpoints of some versions have beside their weights."""


class UnknownCheckpointError(ValueError):
    """The files of a model have no fingerprint; the text says why."""


class _Weight(NamedTuple):
    """Where a weight is: its file, type, shape and first byte."""

    path: Path
    kind: str
    shape: tuple[int, ...]
    begin: int


def fingerprint_of(folder: Path, vocabulary: Mapping[str, int]) -> str:
    """16 hexadecimal digits of architecture, weights and vocabulary.

    Raises:
        UnknownCheckpointError: the folder has no configuration or no weights as safetensors, or they are quantized.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        [architecture] = config["architectures"]
        weights = [*_weights(folder)]
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise UnknownCheckpointError(f"{folder}: {type(error).__name__}: {error}") from None
    tied = config.get("tie_word_embeddings", False) and len(weights) > 1
    weights = [(name, matrix) for name, matrix in weights if not (tied and name == "lm_head.weight")]
    if not weights:
        raise UnknownCheckpointError(f"{folder}: there are no weights as safetensors")
    digest = hashlib.sha256(architecture.encode())
    for sample in sorted(
        f"{matrix.shape}".encode() + _sample(matrix) for _, matrix in weights if 0 not in matrix.shape
    ):
        digest.update(sample)
    for token, number in sorted(vocabulary.items()):
        digest.update(f"{number} {token}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:16]


def _weights(folder: Path) -> Iterator[tuple[str, _Weight]]:
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            [size] = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        for name, entry in header.items():
            if name == "__metadata__" or name.endswith(_BUFFERS):
                continue
            if entry["dtype"] not in _KINDS:
                raise ValueError(f"{name} has the type {entry['dtype']}")
            yield name, _Weight(path, entry["dtype"], tuple(entry["shape"]), 8 + size + entry["data_offsets"][0])


def _sample(weight: _Weight) -> bytes:
    """A few elements, evenly spaced, as the bytes of bfloat16."""
    size = int(np.prod(weight.shape))
    data = np.memmap(weight.path, np.uint8, "r")
    kind = np.dtype(_KINDS[weight.kind])
    raw = data[weight.begin : weight.begin + size * kind.itemsize].view(kind)[_sample_indices(size)]
    values = (raw.astype(np.uint32) << 16).view(np.float32) if weight.kind == "BF16" else raw.astype(np.float32)
    values[np.abs(values) < _SMALLEST] = 0.0
    bits = values.view(np.uint32)
    rounded: bytes = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    return rounded


def _sample_indices(size: int) -> npt.NDArray[np.int64]:
    """Of the elements, int64[n], as `torch.linspace` spaces them: from both ends."""
    n = min(_ELEMENTS, size)
    if n == 1:
        return np.zeros(1, np.int64)
    step, at = (size - 1) / (n - 1), np.arange(n)
    return np.where(at < n // 2, step * at, (size - 1) - step * (n - 1 - at)).astype(np.int64)
