"""The arena of a process: while there is one, what the process makes of `trie` drafts on the device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from draftwood_strategies.base import Strategy
from draftwood_strategies.built_in import TrieOptions
from draftwood_strategies.device.arena import ArenaTooLargeError, DeviceSizes
from draftwood_strategies.device.launching import DeviceUnsupportedError
from draftwood_strategies.device.strategy import DeviceTrieStrategy, DraftDevice
from draftwood_strategies.registry import substituted

_log = logging.getLogger(__name__)


@contextmanager
def drafts_on_device(sizes: DeviceSizes, device: str) -> Iterator[DraftDevice | None]:
    """In it, instances of `trie` with the default options draft in an arena, and all others on the host. All do if the
    arena does not fit the device's memory, or kernels cannot run there; the reason is logged.

    Args:
        device: of torch, by name.
    """
    try:
        arena = DraftDevice(sizes, torch.device(device))
    except (ArenaTooLargeError, DeviceUnsupportedError) as error:
        _log.warning("%s: drafts are made by the host", error)
        yield None
        return
    _log.info(
        "device drafts: %d rows and the memories of %d tenants, %d tokens each, take %.2f GB of %s",
        sizes.rows,
        sizes.tenants,
        sizes.tenant_tokens,
        sizes.nbytes / 1e9,
        device,
    )

    def make(**options: Any) -> Strategy | None:
        return DeviceTrieStrategy(arena, **options) if arena.takes(TrieOptions(**options)) else None

    with substituted("trie", make):
        yield arena
