"""Errors of a memory store.

DraftwoodError
└── MemoryStoreError
    ├── StoreUnavailableError   no answer, or the answer that it cannot serve now
    ├── StoreFullError          out of memory
    ├── MemoryPurgedError       the memory was purged while it was being filled
    ├── StoreRefusedError       permanently refused: password, permission, missing command
    │   └── NewerMemoryError    a newer version of this program wrote to the memory
    └── CorruptValueError       a stored value cannot be read
        ├── NewerFormatError    written by a newer version
        ├── ForeignValueError   belongs to another model
        └── UnknownKeyError     encrypted with a key that this server does not have
"""

from __future__ import annotations

from draftwood_model_runner.errors import DraftwoodError


class MemoryStoreError(DraftwoodError):
    """The memory store failed; generation goes on without it."""


class StoreUnavailableError(MemoryStoreError):
    """The store does not answer, or answers that it cannot serve now; a later call may succeed."""


class StoreFullError(MemoryStoreError):
    """The store is out of memory, or a memory's log has reached its quota."""


class MemoryPurgedError(MemoryStoreError):
    """The memory was purged while it was being filled."""


class StoreRefusedError(MemoryStoreError):
    """The store refuses permanently: a password, a permission, a command that it lacks."""


class NewerMemoryError(StoreRefusedError):
    """A newer version of this program wrote to the memory, so that this one must not change it."""

    def __init__(self) -> None:
        super().__init__("a newer version of this program wrote to the memory; upgrade this server to change it")


class CorruptValueError(MemoryStoreError):
    """A stored value cannot be read."""


class NewerFormatError(CorruptValueError):
    """A newer version of this program wrote the value."""


class ForeignValueError(CorruptValueError):
    """The value was written for another model or tokenizer."""


class UnknownKeyError(CorruptValueError):
    """The value is encrypted, and this server does not have the key."""
