"""`Codec`: records, snapshots and names as the values that a store keeps, and back."""

from __future__ import annotations

import json

from draftwood_service.memory.codec import snapshots
from draftwood_service.memory.codec.encryption import Cipher, KeyRing, Plain
from draftwood_service.memory.codec.records import Record, pack, unpack
from draftwood_service.memory.codec.snapshots import Snapshot
from draftwood_service.memory.errors import CorruptValueError
from draftwood_service.memory.naming import MemoryName


class Codec:
    """Encodes and decodes the values of one model's memories.

    Every value is bound to the tag of its memory, its purpose and its epoch: with keys, a value that was moved
    elsewhere, or brought back after a purge, does not decode.

    Args:
        fingerprint: of model and tokenizer; snapshots of others are not decoded.
        keys: encrypt the values; None stores them in plain.
    """

    def __init__(self, fingerprint: str, keys: KeyRing | None = None) -> None:
        self.fingerprint = fingerprint
        self._cipher: Cipher = Plain() if keys is None else keys

    def encode_record(self, tag: str, epoch: int, record: Record) -> bytes:
        return self._cipher.encrypt(pack([record]), tag, f"log:{epoch}")

    def decode_record(self, tag: str, epoch: int, value: bytes) -> Record:
        """Raises CorruptValueError and its subclasses."""
        records = unpack(self._cipher.decrypt(value, tag, f"log:{epoch}"))
        if len(records) != 1:
            raise CorruptValueError(f"the value has {len(records)} records instead of one")
        return records[0]

    def encode_snapshot(self, tag: str, snapshot: Snapshot) -> bytes:
        return self._cipher.encrypt(snapshots.encode(snapshot), tag, f"snap:{snapshot.epoch}")

    def decode_snapshot(self, tag: str, epoch: int, value: bytes) -> Snapshot:
        """Raises CorruptValueError and its subclasses."""
        return snapshots.decode(self._cipher.decrypt(value, tag, f"snap:{epoch}"), self.fingerprint)

    def encode_name(self, tag: str, name: MemoryName) -> bytes:
        return self._cipher.encrypt(json.dumps([name.tenant, name.arm]).encode(), tag, "name")

    def decode_name(self, tag: str, value: bytes) -> MemoryName:
        """Raises CorruptValueError and its subclasses."""
        try:
            tenant, arm = json.loads(self._cipher.decrypt(value, tag, "name"))
        except ValueError as error:
            raise CorruptValueError(f"the value is not a memory's name: {error}") from error
        return MemoryName(tenant, arm)
