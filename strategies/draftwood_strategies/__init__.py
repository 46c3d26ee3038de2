"""Drafting: token ids in, draft trees out. No torch, no gRPC, no Redis."""

from draftwood_strategies.base import Drafter, Feedback, Strategy
from draftwood_strategies.draft import EMPTY_TREE, DraftTree, MalformedTreeError
from draftwood_strategies.jacobi.strategy import JacobiStrategy
from draftwood_strategies.mixing.hybrid import HybridStrategy
from draftwood_strategies.mixing.recycling import RecyclingStrategy
from draftwood_strategies.none import NoDrafts
from draftwood_strategies.registry import UnknownStrategyError, create, register, strategy_names
from draftwood_strategies.trie.strategy import TrieStrategy

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
