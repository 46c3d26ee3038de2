"""Between records and the bytes of a store: packing, compression, checksums and encryption.

`Codec` is the one entry: what it encodes is stored, what is stored it decodes. The modules of this package are its
inside and are imported by nothing else.
"""

from __future__ import annotations

from draftwood_service.memory.codec.codec import Codec
from draftwood_service.memory.codec.encryption import KeyRing, Plain, read_key_file, read_keys
from draftwood_service.memory.codec.records import Kind, Record, split
from draftwood_service.memory.codec.snapshots import Snapshot

__all__ = ["Codec", "KeyRing", "Kind", "Plain", "Record", "Snapshot", "read_key_file", "read_keys", "split"]
