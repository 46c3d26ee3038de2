"""What the machine has to give. Bytes of memory that are free for keys and values."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_KERNEL_CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
"""Environment variables that torch and oneDNN read at their first product: how many kernels each keeps."""

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Memory of the device that nobody uses; on a CPU within what the container may take."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_machine_bytes(_MEMINFO), _container_bytes(_CGROUP))


def bound_kernel_caches(kernels: int) -> None:
    """Lets torch and oneDNN keep that many compiled kernels each, unless the user says how many.

    They keep one for each shape of a product, 1,024 of them, and one takes 0.55 MiB. As steps have all widths, a
    service of a model of 6 MiB would grow by half a gigabyte in its first hour. Only counts before the first product.
    """
    for name in _KERNEL_CACHES:
        os.environ.setdefault(name, str(kernels))


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
