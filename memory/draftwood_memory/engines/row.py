"""What an engine tells of a request in its step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np


class Row(NamedTuple):
    """A request in the engine's step.

    Attributes:
        tokens: int32[n] or another type of whole numbers: its prompt and all that it wrote, this step's tokens too.
        prompt: tokens of its prompt.
        room: how many tokens may be drafted; 0 or less for none.
        options: what the request carries, read when it is seen first.
        writes: False while its prompt is not read to its end.
        stops: tokens that end it.
    """

    request_id: str
    tokens: np.ndarray[Any, np.dtype[Any]]
    prompt: int
    room: int
    options: Mapping[str, Any] | None
    writes: bool = True
    stops: Collection[int] = ()
