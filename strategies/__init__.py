"""Drafting: token ids in, draft trees out. No torch, no gRPC, no Redis."""

from strategies.base import Drafter, Feedback, Strategy
from strategies.draft import EMPTY_TREE, DraftTree, MalformedTreeError
from strategies.hybrid import HybridStrategy
from strategies.jacobi import JacobiStrategy
from strategies.none import NoDrafts
from strategies.recycling import RecyclingStrategy
from strategies.registry import UnknownStrategyError, create, names, register
from strategies.trie import TrieStrategy

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
    "names",
    "register",
]
