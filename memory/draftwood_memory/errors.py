"""What can go wrong with a memory or its store, as types.

DraftwoodMemoryError
├── InvalidSettingError         an address, key or folder cannot be used
└── MemoryStoreError
    ├── StoreUnavailableError   no answer, or the answer that it cannot serve now
    ├── StoreFullError          out of memory
    ├── MemoryPurgedError       the memory was purged while it was being filled
    ├── StoreRefusedError       permanently refused: password, permission, missing command
    │   ├── NewerMemoryError    a newer version of this program wrote to the memory
    │   └── WrongTypeError      another program wrote to a key
    └── CorruptValueError       a stored value cannot be read
        ├── NewerFormatError    written by a newer version
        └── UnknownKeyError     encrypted with a key that this process does not have
"""

from __future__ import annotations

from typing import Any


class DraftwoodMemoryError(Exception):
    """Any error that this package raises on purpose."""


class InvalidSettingError(DraftwoodMemoryError, ValueError):
    """A setting cannot be used. The text is "FIELD VALUE: PROBLEM".

    Attributes:
        value: without passwords; None leaves it out of the text.
    """

    def __init__(self, field: str, value: object, problem: str) -> None:
        text = str(value)
        shown = "" if value is None else f" {text if text.isprintable() else repr(text)}"
        super().__init__(f"{field}{shown}: {problem}")
        self.field = field
        self.value = value
        self.problem = problem

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, self.value, self.problem)


class MemoryStoreError(DraftwoodMemoryError):
    """The memory store failed; generation goes on without it."""


class StoreUnavailableError(MemoryStoreError):
    """The store does not answer, or answers that it cannot serve now; a later call may succeed."""


class StoreFullError(MemoryStoreError):
    """The store is out of memory."""


class MemoryPurgedError(MemoryStoreError):
    """The memory was purged while it was being filled."""


class StoreRefusedError(MemoryStoreError):
    """The store refuses permanently: a password, a permission, a command that it lacks."""


class NewerMemoryError(StoreRefusedError):
    """A newer version of this program wrote to the memory, so that this one must not change it."""

    def __init__(
        self, text: str = "a newer version of this program wrote to the memory; upgrade this server to change it"
    ) -> None:
        super().__init__(text)


class WrongTypeError(StoreRefusedError):
    """Another program wrote to a key, which is of another type now. Other keys can be used."""


class CorruptValueError(MemoryStoreError):
    """A stored value cannot be read."""


class NewerFormatError(CorruptValueError):
    """A newer version of this program wrote the value."""


class UnknownKeyError(CorruptValueError):
    """The value is encrypted, and this process does not have the key."""
