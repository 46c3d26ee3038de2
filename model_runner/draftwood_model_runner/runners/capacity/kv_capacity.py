"""How many tokens of keys and values, and states of recurrent layers, the memory of the device holds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch

from draftwood_model_runner.errors import InvalidValueError

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


_KEPT_STATES = 1 << 28
"""Bytes of states that are kept for sequences with the same prefix, beside an eighth of the KV memory."""


def default_capacity(
    bytes_per_token: int, device: torch.device, context: int, sequences: int, bytes_per_sequence: int = 0
) -> int:
    """Tokens for `sequences` whole contexts, or for as many as fit a share of the device's free memory.

    Args:
        bytes_per_sequence: of the states of recurrent layers, which are in that share too; they get half of it at most.

    Raises:
        InvalidValueError: not even one fits.
    """
    share = 0.8 if device.type == "cuda" else 0.5
    memory = int(share * free_bytes(device))
    affordable = memory // bytes_per_token
    if bytes_per_sequence:
        of_states = min(sequences * bytes_per_sequence, memory // 2)
        affordable = max(0, memory - of_states - _least_kept(memory)) * 8 // (9 * bytes_per_token)
    if affordable < context:
        gigabytes = context * bytes_per_token / 1e9
        raise InvalidValueError(
            "max_context",
            context,
            f"keys and values of one context take {gigabytes:.1f} GB, for which memory does not suffice; at most"
            f" {affordable} tokens fit {share:.0%} of what is free, and kv_cache_tokens can set another limit",
        )
    return min(sequences * context, affordable)


class StateCapacity(NamedTuple):
    """How much of recurrent layers' states the memory of the device holds.

    Attributes:
        sequences: live ones; at least one.
        kept_bytes: of states that no live sequence needs.
    """

    sequences: int
    kept_bytes: int


def state_capacity(bytes_per_sequence: int, kv_bytes: int, device: torch.device) -> StateCapacity:
    """Of states beside keys and values of `kv_bytes`, which are not allocated yet."""
    memory = int(0.9 * free_bytes(device))
    kept = kv_bytes // 8 + _least_kept(memory)
    return StateCapacity(max(1, (memory - kv_bytes - kept) // bytes_per_sequence), kept)


def _least_kept(memory: int) -> int:
    return min(_KEPT_STATES, memory // 8)


def free_bytes(device: torch.device) -> int:
    """Unused memory of the device; on a CPU within the limit of the container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_machine_bytes(_MEMINFO), _container_bytes(_CGROUP))


def _machine_bytes(meminfo: Path) -> int:
    """What Linux calls available; elsewhere half of the memory that there is."""
    try:
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _container_bytes(cgroup: Path) -> int:
    """What is left below the limit of a version 2 control group, where pages of files that can go count as free."""
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return max(limit - used + int(stat.get("inactive_file", 0)), 0)
    except (OSError, ValueError):
        return 2**63  # no limit: the file is absent, or reads "max"
