"""What the machine offers: free memory for keys and values, and widths that kernels are compiled for."""

from __future__ import annotations

import os
from bisect import bisect_left
from pathlib import Path

import torch

KERNEL_CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
"""Environment variables that torch and oneDNN read at their first product: how many kernels each keeps."""

_WIDTHS = (*range(1, 33), *range(34, 65, 2), *range(72, 129, 8), *range(144, 257, 16), *range(288, 513, 32))
_BEYOND = 64

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Unused memory of the device; on a CPU within the limit of the container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_machine_bytes(_MEMINFO), _container_bytes(_CGROUP))


def kernel_width(rows: int) -> int:
    """The number of rows that a product of `rows` rows is best filled up to.

    oneDNN compiles a kernel for each, in 0.3 ms, and keeps it: 0.55 MiB. Up to 32 rows each has its own, above it is up
    to an eighth more.
    """
    if rows > _WIDTHS[-1]:
        return -(-rows // _BEYOND) * _BEYOND
    return int(_WIDTHS[bisect_left(_WIDTHS, rows)])


def bound_kernel_caches(shapes: int) -> None:
    """Lets torch and oneDNN keep kernels for weights of `shapes` shapes and all usual widths, unless the environment
    already sets a number: the default of 1,024 takes half a gigabyte. Has no effect after the first product of the
    process, when both libraries have read their limits.
    """
    for name in KERNEL_CACHES:
        os.environ.setdefault(name, str(shapes * (len(_WIDTHS) + 8)))


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
