"""What can go wrong, as types. The service maps each to one gRPC status.

DraftwoodError
├── InvalidValueError        a field of a request or a setting has a value that is not allowed
│   └── InvalidInputError    it is wrong in another way than a value outside its range
├── ModelNotFoundError       there is no model under the path or name given
├── UnsupportedModelError    a model that trees cannot be verified on
│   └── UnsupportedRunnerError   a model that the runner asked for cannot compute
├── DeadlineError            the deadline of a sequence passed or could not be met any more
├── ModelError               the model failed in a step; the sequences of that step end
└── EngineStoppedError       the engine is closed, or died
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


class ModelNotFoundError(DraftwoodError):
    """No model could be loaded from the path or hub id given."""


class UnsupportedModelError(DraftwoodError):
    """The model cannot be served losslessly; the message gives the reason."""


class UnsupportedRunnerError(UnsupportedModelError):
    """The model cannot be computed by one kind of runner; the message names the runner and gives the reason."""


class DeadlineError(DraftwoodError):
    """The deadline of a sequence passed before it ended, or left too little time for its prompt.

    Attributes:
        late: seconds since the deadline; negative where it could not be met any more.
    """

    def __init__(self, late: float) -> None:
        super().__init__(
            f"the deadline passed {late:.3g} s ago"
            if late >= 0
            else f"the deadline is in {-late:.3g} s, which is too little for the prompt"
        )
        self.late = late

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.late,)


class ModelError(DraftwoodError):
    """The model's forward pass raised; `__cause__` is what it raised."""


class DeviceMemoryError(DraftwoodError):
    """The device had no memory for a step; nothing was written, and a smaller step may fit."""


class DeviceLostError(DraftwoodError):
    """The device computes nothing more for this process, which must end."""


class EngineStoppedError(DraftwoodError):
    """The engine takes no more work."""
