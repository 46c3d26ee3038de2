"""Drafting: token ids in, draft trees out. No torch, no gRPC, no Redis."""

from strategies.base import Drafter, Feedback, Strategy
from strategies.draft import EMPTY_TREE, DraftTree, MalformedTreeError
from strategies.none import NoDrafts
from strategies.registry import UnknownStrategyError, create, names, register
from strategies.trie import TrieStrategy

__all__ = [
    "EMPTY_TREE",
    "DraftTree",
    "Drafter",
    "Feedback",
    "MalformedTreeError",
    "NoDrafts",
    "Strategy",
    "TrieStrategy",
    "UnknownStrategyError",
    "create",
    "names",
    "register",
]
