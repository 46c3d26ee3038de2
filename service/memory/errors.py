"""What a memory store can refuse or fail with.

DraftwoodError
└── MemoryStoreError
    ├── StoreUnavailableError   it does not answer, or answers that it cannot serve now
    ├── StoreFullError          it has no room
    ├── MemoryPurgedError       the memory was purged while it was being filled
    ├── StoreRefusedError       it refuses for good: a password, a right, a command that it lacks
    └── CorruptValueError       what it holds cannot be read
        ├── NewerFormatError    a newer version wrote it
        ├── ForeignValueError   it belongs to another model
        └── UnknownKeyError     it is encrypted, and the key is not here
"""

from __future__ import annotations

from model_runner.errors import DraftwoodError


class MemoryStoreError(DraftwoodError):
    """The memory's store failed; generation goes on without it."""


class StoreUnavailableError(MemoryStoreError):
    """It does not answer, or answers that it cannot serve now; later it may."""


class StoreFullError(MemoryStoreError):
    """It has no room."""


class MemoryPurgedError(MemoryStoreError):
    """The memory was purged while it was being filled."""


class StoreRefusedError(MemoryStoreError):
    """It refuses for good: a password, a right, a command that it lacks."""


class CorruptValueError(MemoryStoreError):
    """What it holds cannot be read."""


class NewerFormatError(CorruptValueError):
    """A newer version of this program wrote it."""


class ForeignValueError(CorruptValueError):
    """It was written for another model or tokenizer."""


class UnknownKeyError(CorruptValueError):
    """It is encrypted, and the key is not among those given."""
