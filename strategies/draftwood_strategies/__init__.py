"""Drafting: token ids in, draft trees out.

Names are imported when they are first asked for: a process that only reads names and options of strategies needs
neither numpy nor numba, which takes 0.12 GB.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftwood_strategies.base import Drafter, Feedback, Strategy
    from draftwood_strategies.draft import EMPTY_TREE, DraftTree, MalformedTreeError
    from draftwood_strategies.jacobi import JacobiStrategy
    from draftwood_strategies.mixing.hybrid import HybridStrategy
    from draftwood_strategies.mixing.mixture import RecyclingStrategy
    from draftwood_strategies.none import NoDrafts
    from draftwood_strategies.registry import UnknownStrategyError, create, register, strategy_names
    from draftwood_strategies.trie.strategy import TrieStrategy

_MODULES = {
    **dict.fromkeys(("Drafter", "Feedback", "Strategy"), "base"),
    **dict.fromkeys(("UnknownStrategyError", "create", "register", "strategy_names"), "registry"),
    "EMPTY_TREE": "draft",
    "DraftTree": "draft",
    "MalformedTreeError": "draft",
    "JacobiStrategy": "jacobi",
    "HybridStrategy": "mixing.hybrid",
    "RecyclingStrategy": "mixing.mixture",
    "NoDrafts": "none",
    "TrieStrategy": "trie.strategy",
}

__all__ = [
    "EMPTY_TREE",
    "DraftTree",
    "Drafter",
    "Feedback",
    "HybridStrategy",
    "JacobiStrategy",
    "MalformedTreeError",
    "NoDrafts",
    "RecyclingStrategy",
    "Strategy",
    "TrieStrategy",
    "UnknownStrategyError",
    "create",
    "register",
    "strategy_names",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
