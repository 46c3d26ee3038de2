"""What every package of Draftwood may raise: the root of its errors, and values that are not allowed.

A package of its own, beside the strategies, since it is imported before anything large is.

DraftwoodError
└── InvalidValueError        a field of a request or a setting has a value that is not allowed
    └── InvalidInputError    it is wrong in another way than a value outside its range
"""

from __future__ import annotations

from reprlib import Repr
from typing import Any

_SHORT = Repr()
"""Shows a value of a caller, however large it is, in few characters and little time."""
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200


class DraftwoodError(Exception):
    """Any error that Draftwood raises on purpose."""


class InvalidValueError(DraftwoodError, ValueError):
    """A value that is not allowed.

    Attributes:
        field: the field's path as the caller knows it, such as "sampling.temperature".
        value: what it was.
        allowed: what it may be, in words.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}: {_SHORT.repr(value)} is not allowed; {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, self.value, self.allowed)


class InvalidInputError(InvalidValueError):
    """An input that is wrong in another way than a value outside its range. The text is "FIELD VALUE: PROBLEM".

    Attributes:
        value: None leaves it out of the text.
        allowed: the problem, in words.
    """

    def __init__(self, field: str, value: object, problem: str) -> None:
        text = "" if value is None else str(value)[:200]
        shown = text if text.isprintable() else repr(text)
        ValueError.__init__(self, f"{field}{' ' if shown else ''}{shown}: {problem}")
        self.field = field
        self.value = value
        self.allowed = problem
