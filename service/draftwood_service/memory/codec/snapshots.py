"""A snapshot, the compacted log, as one value: magic, version, checksum, model fingerprint, compressed records."""

from __future__ import annotations

import hashlib
import struct
import zlib
from dataclasses import dataclass

from draftwood_service.memory.codec.records import Record, pack, unpack
from draftwood_service.memory.errors import CorruptValueError, ForeignValueError, NewerFormatError

_MAGIC = b"DWMEMORY"
VERSION = 1
_HEAD = struct.Struct("<8sH32s")
_INFO = struct.Struct("<32sQQ16s")
_LEVEL = 1
"""zlib's fastest level. Not tuned: a snapshot of a million tokens takes a fifth of a second, on the memory thread."""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The records of a memory's log up to a position, without those that were evicted by then.

    Attributes:
        fingerprint: of the model and tokenizer that the tokens belong to, at most 32 characters.
        epoch: of the memory; each purge raises it.
        position: of the last record in it.
        chain: the log's digest at that position, 16 hexadecimal digits, or "" at position 0.
    """

    fingerprint: str
    epoch: int
    position: int
    chain: str
    records: list[Record]


def encode(snapshot: Snapshot) -> bytes:
    info = _INFO.pack(snapshot.fingerprint.encode(), snapshot.epoch, snapshot.position, snapshot.chain.encode())
    body = info + zlib.compress(pack(snapshot.records), _LEVEL)
    return _HEAD.pack(_MAGIC, VERSION, hashlib.sha256(body).digest()) + body


def decode(data: bytes, fingerprint: str) -> Snapshot:
    """The snapshot of `encode`.

    Raises:
        NewerFormatError: a newer version wrote it.
        ForeignValueError: it belongs to a model with another fingerprint.
        CorruptValueError: it is damaged, or not a snapshot.
    """
    if len(data) < _HEAD.size:
        raise CorruptValueError(f"a snapshot of {len(data)} bytes is cut short")
    magic, version, digest = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise CorruptValueError("the value is not a snapshot")
    if version > VERSION:
        raise NewerFormatError(f"the snapshot has version {version}; this program reads up to {VERSION}")
    if version < VERSION:
        raise CorruptValueError(f"the snapshot has version {version}, which does not exist")
    body = data[_HEAD.size :]
    if hashlib.sha256(body).digest() != digest or len(body) < _INFO.size:
        raise CorruptValueError("the snapshot's checksum does not match")
    owner, epoch, position, chain = _INFO.unpack_from(body)
    if (found := owner.rstrip(b"\x00").decode()) != fingerprint:
        raise ForeignValueError(f"the snapshot is of the model {found}, not of {fingerprint}")
    try:
        records = unpack(zlib.decompress(body[_INFO.size :]))
    except zlib.error as error:
        raise CorruptValueError(f"the snapshot cannot be decompressed: {error}") from error
    return Snapshot(found, epoch, position, chain.rstrip(b"\x00").decode(), records)
