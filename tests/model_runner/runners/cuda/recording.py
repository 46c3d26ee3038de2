"""What stands for a CUDA graph on a CPU: a step whose operations are noted, and compared whenever it runs again.

A graph repeats the kernels that it captured, on the memory that they used. So a step that is replayed must do the same
operations, on tensors of the same shapes, with its inputs at the same addresses; must not let the host wait for the
device; and must not decide anything by what a tensor holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftwood_model_runner.runners.cuda.device import LAUNCHER, Launch
from draftwood_model_runner.runners.cuda.forward import Forward, PreparedStep
from draftwood_model_runner.runners.model_calls import setting

_WAITING = frozenset(
    {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::unique_dim", "aten::_unique2"}
)
"""Operations whose result the host, or the shape of a result, depends on."""


class CaptureError(RuntimeError):
    """A step does what no CUDA graph can."""


class Recording:
    """Implements `forward.Replayable`.

    Raises:
        CaptureError: the step waits for the device.
    """

    def __init__(self, forward: Forward, ready: PreparedStep) -> None:
        self._forward, self._ready = forward, ready
        self._noted = self._run()[0]

    def replay(self) -> torch.Tensor:
        noted, logits = self._run()
        if noted != self._noted:
            first = next((pair for pair in zip(self._noted, noted, strict=False) if pair[0] != pair[1]), None)
            raise CaptureError(
                f"a step of {self._ready.tokens} tokens did other operations than when it was captured:"
                f" {len(self._noted)} and {len(noted)}, first difference {first}"
            )
        return logits

    def _run(self) -> tuple[list[str], torch.Tensor]:
        notes = _Notes()
        fixed = frozenset(tensor.untyped_storage().data_ptr() for tensor in self._forward.fixed_memory)
        notes.fixed = fixed
        with setting(LAUNCHER, notes.launch), notes:
            logits = self._forward.launch(self._ready)
        return notes.noted, logits


class _Notes(TorchDispatchMode):
    """Notes each operation with its shapes; memory that is fixed by its address, other memory not."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.noted: list[str] = []
        self.fixed: frozenset[int] = frozenset()
        self._launching = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._launching:
            return result
        name = func.name()
        if name.split(".")[0] in _WAITING:
            raise CaptureError(f"{name} lets the host wait for the device")
        self.noted.append(f"{name} {self._shapes((args, kwargs))} -> {self._shapes(result)}")
        return result

    def launch(self, launch: Launch) -> None:
        """A kernel, whose interpreter copies tensors in ways of its own."""
        shapes = self._shapes((launch.arguments, launch.constants))
        self.noted.append(f"{launch.kernel.__name__}{launch.grid} {shapes}")
        self._launching = True
        try:
            launch.run()
        finally:
            self._launching = False

    def _shapes(self, values: Any) -> str:
        return ", ".join(self._shape(value) for value in tree_leaves(values))

    def _shape(self, value: Any) -> str:
        if not isinstance(value, torch.Tensor):
            return repr(value) if isinstance(value, (int, float, str, torch.dtype)) else type(value).__name__
        owned = type(value) in (torch.Tensor, torch.nn.Parameter)  # a shard's wrapper has no memory of its own
        fixed = owned and value.untyped_storage().data_ptr() in self.fixed
        where = f" at {value.data_ptr()}" if fixed else ""
        return f"{value.dtype}{tuple(value.shape)}{where}"
