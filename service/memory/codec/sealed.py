"""Records, snapshots and names as the values that a store keeps, and back."""

from __future__ import annotations

import json
from dataclasses import dataclass

from service.memory.codec import snapshots
from service.memory.codec.records import Record, pack
from service.memory.codec.sealing import Sealer
from service.memory.codec.snapshots import Snapshot
from service.memory.errors import CorruptValueError
from service.memory.names import MemoryName
from service.memory.store.base import Entry


@dataclass(frozen=True, slots=True)
class Sealed:
    """The values of one model's memories.

    Attributes:
        fingerprint: of model and tokenizer.
    """

    fingerprint: str
    sealer: Sealer

    def entry(self, tag: str, record: Record) -> Entry:
        value = self.sealer.seal(pack([record]), f"{tag}:log")
        return Entry(record.seq, int(record.tokens.size), value)

    def open_entry(self, tag: str, value: bytes) -> bytes:
        """Packed records. Raises CorruptValueError and its kinds."""
        return self.sealer.open(value, f"{tag}:log")

    def seal_snapshot(self, tag: str, snapshot: Snapshot) -> bytes:
        return self.sealer.seal(snapshots.encode(snapshot), f"{tag}:snap")

    def snapshot(self, tag: str, value: bytes) -> Snapshot:
        """Raises CorruptValueError and its kinds."""
        return snapshots.decode(self.sealer.open(value, f"{tag}:snap"), self.fingerprint)

    def name(self, tag: str, name: MemoryName) -> bytes:
        return self.sealer.seal(json.dumps([name.tenant, name.arm]).encode(), f"{tag}:name")

    def open_name(self, tag: str, value: bytes) -> MemoryName:
        """Raises CorruptValueError and its kinds."""
        try:
            tenant, arm = json.loads(self.sealer.open(value, f"{tag}:name"))
        except ValueError as error:
            raise CorruptValueError(f"not a memory's name: {error}") from error
        return MemoryName(tenant, arm)
