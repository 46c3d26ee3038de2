"""Drafting: token ids in, draft trees out. No torch, no gRPC, no Redis."""

from strategies.base import Drafter, Feedback, Strategy
from strategies.draft import EMPTY_TREE, DraftTree, MalformedTreeError
from strategies.jacobi.strategy import JacobiStrategy
from strategies.mixing.hybrid import HybridStrategy
from strategies.mixing.recycling import RecyclingStrategy
from strategies.none import NoDrafts
from strategies.registry import UnknownStrategyError, create, register, strategy_names
from strategies.trie.strategy import TrieStrategy

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
