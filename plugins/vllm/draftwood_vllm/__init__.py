"""Draftwood's drafts inside vLLM.

`Proposer` is the class to name in `--speculative-config`, `TenantHeader` the one for `--middleware`. They are imported
when they are first used: vLLM loads this package in each of its processes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftwood_memory.engines.tenant_header import TenantHeader
    from draftwood_vllm.proposer import Proposer

__all__ = ["Proposer", "TenantHeader"]

_MODULES = {"Proposer": "draftwood_vllm.proposer", "TenantHeader": "draftwood_memory.engines.tenant_header"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
