"""What can go wrong, as types. The service maps each to one gRPC status.

DraftwoodError, InvalidValueError and InvalidInputError are those of `draftwood_errors`.

DraftwoodError
├── InvalidValueError
│   └── InvalidInputError
├── ModelNotFoundError       there is no model under the path or name given
├── UnsupportedModelError    a model that trees cannot be verified on
│   └── UnsupportedRunnerError   a model that the runner asked for cannot compute
├── DeadlineError            the deadline of a sequence passed or could not be met any more
├── ModelError               the model failed in a step; the sequences of that step end
├── FormatsUnavailableError  no process can be started that tries formats
└── EngineStoppedError       the engine is closed, or died
"""

from __future__ import annotations

from typing import Any

from draftwood_errors import DraftwoodError, InvalidInputError, InvalidValueError

__all__ = [
    "DeadlineError",
    "DeviceLostError",
    "DeviceMemoryError",
    "DraftwoodError",
    "EngineStoppedError",
    "FormatsUnavailableError",
    "InvalidInputError",
    "InvalidValueError",
    "ModelError",
    "ModelNotFoundError",
    "UnsupportedModelError",
    "UnsupportedRunnerError",
]


class ModelNotFoundError(DraftwoodError):
    """No model could be loaded from the path or hub id given."""


class UnsupportedModelError(DraftwoodError):
    """The model cannot be served losslessly; the message gives the reason."""


class UnsupportedRunnerError(UnsupportedModelError):
    """The model cannot be computed by one kind of runner; the message names the runner and gives the reason."""


class DeadlineError(DraftwoodError):
    """The deadline of a sequence passed before it ended, or left too little time for its prompt.

    Attributes:
        late: seconds since the deadline; negative if it could not be met any more.
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


class FormatsUnavailableError(DraftwoodError):
    """No process can be started that tries formats."""

    def __init__(self) -> None:
        super().__init__("the server cannot check formats now; try again later")
