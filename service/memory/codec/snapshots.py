"""The compacted log: one value that says what it is, for which model, and whether it is whole."""

from __future__ import annotations

import hashlib
import struct
import zlib
from dataclasses import dataclass

from service.memory.codec.records import Record, pack, unpack
from service.memory.errors import CorruptValueError, ForeignValueError, NewerFormatError

_MAGIC = b"DWMEMORY"
VERSION = 1
_HEAD = struct.Struct("<8sH32s")
_FACTS = struct.Struct("<32sQQ16s")
_LEVEL = 1


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """All that a memory's log held up to a position, without what had left by then.

    Attributes:
        fingerprint: of the model and tokenizer whose tokens these are, at most 32 characters.
        epoch: which life of the memory, since its last purge.
        position: of the last record that went into it.
        chain: the log's digest at that position, 16 hexadecimal digits, or "" at position 0.
    """

    fingerprint: str
    epoch: int
    position: int
    chain: str
    records: list[Record]


def encode(snapshot: Snapshot) -> bytes:
    facts = _FACTS.pack(snapshot.fingerprint.encode(), snapshot.epoch, snapshot.position, snapshot.chain.encode())
    body = facts + zlib.compress(pack(snapshot.records), _LEVEL)
    return _HEAD.pack(_MAGIC, VERSION, hashlib.sha256(body).digest()) + body


def decode(data: bytes, fingerprint: str) -> Snapshot:
    """The snapshot of `encode`.

    Raises:
        NewerFormatError: a newer version wrote it.
        ForeignValueError: it is of a model with another fingerprint.
        CorruptValueError: it is not whole, or no snapshot.
    """
    if len(data) < _HEAD.size:
        raise CorruptValueError(f"a snapshot of {len(data)} bytes is cut short")
    magic, version, digest = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise CorruptValueError("the value is no snapshot")
    if version > VERSION:
        raise NewerFormatError(f"the snapshot has version {version}; this program reads up to {VERSION}")
    if version < VERSION:
        raise CorruptValueError(f"there never was a snapshot of version {version}")
    body = data[_HEAD.size :]
    if hashlib.sha256(body).digest() != digest or len(body) < _FACTS.size:
        raise CorruptValueError("the snapshot's checksum does not match")
    owner, epoch, position, chain = _FACTS.unpack_from(body)
    if (found := owner.rstrip(b"\x00").decode()) != fingerprint:
        raise ForeignValueError(f"the snapshot is of the model {found}, not of {fingerprint}")
    try:
        records = unpack(zlib.decompress(body[_FACTS.size :]))
    except zlib.error as error:
        raise CorruptValueError(f"the snapshot cannot be unpacked: {error}") from error
    return Snapshot(found, epoch, position, chain.rstrip(b"\x00").decode(), records)
