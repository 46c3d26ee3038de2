"""Opens the memory of the model that vLLM serves, by the variables of its environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from draftwood_memory.engines.drafts import Host
from draftwood_memory.engines.policy import DecidedPolicy
from draftwood_strategies.draft_engine.engine import Verifies
from draftwood_tenants.engines import Opened, OpenedDrafts, Parts, ServedModel
from draftwood_vllm.service_link import SOCKET_VARIABLE, Recorder

if TYPE_CHECKING:
    import torch

    from draftwood_memory.memory import Memory
    from draftwood_vllm.device_memory import DeviceMemory


def open_drafts(
    environ: Mapping[str, str], model: ServedModel, longest: int, is_live: Callable[[str], bool]
) -> OpenedDrafts:
    """Chains of at most `longest` tokens for the requests of an engine; other arguments as in `OpenedDrafts`, `Host`.

    If Draftwood's service runs the engine, it decides how requests are drafted for, and gets reports of the drafts.

    Raises:
        InvalidSettingError, InvalidInputError, MemoryStoreError: as `OpenedDrafts`.
    """
    path, host = environ.get(SOCKET_VARIABLE), Host(Verifies.CHAINS, longest, is_live)
    if not path:
        return OpenedDrafts("vLLM", environ, model, host)
    return OpenedDrafts("vLLM", environ, model, host, DecidedPolicy(), _recorder(path))


def open_device_memory(
    environ: Mapping[str, str], model: ServedModel, device: torch.device, regions: int
) -> Opened[DeviceMemory]:
    """As `open_drafts`, for drafts that are made on a device with so many regions."""
    from draftwood_vllm.device_memory import DeviceMemory

    def make(parts: Parts) -> DeviceMemory:
        return DeviceMemory(parts.memory, parts.policy, device, regions, parts.publish, parts.on_drafts)

    path = environ.get(SOCKET_VARIABLE)
    if not path:
        return Opened("vLLM", environ, model, make)
    return Opened("vLLM", environ, model, make, DecidedPolicy(), _recorder(path))


def _recorder(path: str) -> Callable[[Memory], Recorder] | None:
    """Reports to the service; None if that runs on another machine."""
    return (lambda memory: Recorder(path, memory)) if os.path.exists(path) else None
