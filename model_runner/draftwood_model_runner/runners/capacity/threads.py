"""How many threads compute a step."""

from __future__ import annotations

import torch

from draftwood_strategies.threads.cpus import usable_cpus


def default_threads() -> int:
    """Threads of a step that names no number: those of torch (its own choice, or OMP_NUM_THREADS), and no more than
    `usable_cpus`. Threads beyond the quota spin while the kernel holds the process back."""
    return min(torch.get_num_threads(), usable_cpus())
