"""Results of modules that one kernel computed together with those of another module."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class Pending:
    """Results until their modules are called: those of one input only, and each for one call.

    A step has its own, so that a step that fails leaves nothing behind.
    """

    def __init__(self) -> None:
        self._input: torch.Tensor | None = None
        self._results: dict[object, torch.Tensor] = {}

    def put(self, computed_of: torch.Tensor, results: Mapping[object, torch.Tensor]) -> None:
        """Keeps the results of modules for an input; those for the input before are given up."""
        self._input, self._results = computed_of, dict(results)

    def take(self, module: object, called_with: torch.Tensor) -> torch.Tensor | None:
        """The result of a module for this very tensor; None if it has not been computed, or was taken before."""
        if called_with is not self._input:
            return None
        found = self._results.pop(module, None)
        if not self._results:
            self._input = None
        return found
