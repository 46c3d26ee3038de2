"""The strategies of this package: their options, and where their code is, which is imported for the first instance.

Reading options and names needs neither numba nor any strategy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Literal

from draftwood_strategies.options import Range, check, read_options

if TYPE_CHECKING:
    from draftwood_strategies.base import Strategy


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """The options of a strategy, in the types and ranges that its annotations say: here none.

    Raises:
        TypeError: there is no such option.
        ValueError: an option's value is not allowed; the text begins with its name.
    """

    def __post_init__(self) -> None:
        factory: Callable[..., StrategyOptions] = type(self)
        check(read_options(factory), {field.name: getattr(self, field.name) for field in fields(self)})


@dataclass(frozen=True, kw_only=True)
class TrieOptions(StrategyOptions):
    """Those of `trie`.

    Attributes:
        branch_length: the deepest draft, in tokens.
        learn: the part of each sequence that the memory learns.
        prompt_weight: multiplies the votes of the own prompt at first; online learning goes on from there.
        capacity_tokens: how many tokens the memory holds; the oldest leave first.
    """

    branch_length: Annotated[int, Range(1, 256)] = 32
    learn: Literal["outputs", "prompts", "both"] = "outputs"
    prompt_weight: Annotated[float, Range(0, 1000, open=True)] = 1.0
    capacity_tokens: Annotated[int, Range(minimum=64)] = 1_000_000


@dataclass(frozen=True, kw_only=True)
class RecyclingOptions(StrategyOptions):
    """Those of `recycling`.

    Attributes:
        capacity_contexts: how many contexts the table holds at most, 44 bytes each, rounded down to a power of two;
            those written longest ago leave first.
    """

    capacity_contexts: Annotated[int, Range(minimum=1024)] = 1 << 17


@dataclass(frozen=True, kw_only=True)
class JacobiOptions(StrategyOptions):
    """Those of `jacobi`. W 10, N 5 and G 10 are published values; docs/decisions/hybrid.md has what they gain.

    Attributes:
        window: W, the columns of the window. A draft takes at most half its budget for the window, which is narrower
            where W columns do not fit.
        ngram: N, the length of the n-grams.
        guesses: G, the greatest number of n-grams verified in a step.
        pool_keys: the greatest number of first tokens in a pool.
    """

    window: Annotated[int, Range(1, 64)] = 10
    ngram: Annotated[int, Range(3, 16)] = 5
    guesses: Annotated[int, Range(1, 64)] = 10
    pool_keys: Annotated[int, Range(1, 1 << 20)] = 4096


@dataclass(frozen=True, kw_only=True)
class HybridOptions(StrategyOptions):
    """Those of `hybrid`; it also takes the options of its sources.

    Attributes:
        sources: names of registered strategies, separated by commas; at most four besides the one with a successor
            table.
    """

    sources: str = "trie,recycling"

    def names(self) -> list[str]:
        """The sources, in their order.

        Raises:
            ValueError: one is there twice, or is the hybrid itself.
        """
        names = [name.strip() for name in self.sources.split(",")]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"sources: {self.sources!r} names a strategy twice")
        if "hybrid" in names:
            raise ValueError(f"sources: {self.sources!r} names hybrid, which cannot be a source of itself")
        return names


@dataclass(frozen=True, kw_only=True)
class ModelDraftOptions(StrategyOptions):
    """Those of `draft_model` and `head`.

    Attributes:
        depth: levels of a draft at most; fewer where more do not pay.
    """

    depth: Annotated[int, Range(1, 16)] = 6


@dataclass(frozen=True)
class BuiltIn:
    """A factory of a built-in strategy.

    Attributes:
        kind: the class of its options.
        module, class_name: where the strategy is.
    """

    kind: Callable[..., StrategyOptions]
    module: str
    class_name: str

    def __call__(self, **options: Any) -> Strategy:
        made: Strategy = getattr(import_module(self.module), self.class_name)(**options)
        return made


BUILT_IN = {
    "none": BuiltIn(StrategyOptions, "draftwood_strategies.none", "NoDrafts"),
    "trie": BuiltIn(TrieOptions, "draftwood_strategies.trie.strategy", "TrieStrategy"),
    "recycling": BuiltIn(RecyclingOptions, "draftwood_strategies.mixing.mixture", "RecyclingStrategy"),
    "jacobi": BuiltIn(JacobiOptions, "draftwood_strategies.jacobi", "JacobiStrategy"),
    "hybrid": BuiltIn(HybridOptions, "draftwood_strategies.mixing.hybrid", "HybridStrategy"),
}
"""By name."""
LOADED_BY = {"head": "--draft-head", "draft_model": "--draft-model"}
"""Strategies that draft by a model beside the target, and the flag of `draftwood serve` that loads it."""
