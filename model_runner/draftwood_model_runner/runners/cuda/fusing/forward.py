"""What takes the place of a module's forward."""

from __future__ import annotations

from typing import Any


class FusedForward:
    """A forward with fewer kernels. It is an attribute of the module that it is installed on, not of its class."""

    __call__: Any


def remove(module: Any) -> None:
    """Gives the parts of a model their own forwards back."""
    for part in module.modules():
        if isinstance(vars(part).get("forward"), FusedForward):
            del part.forward
