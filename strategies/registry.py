"""Strategies by name: the built-in ones, and those that other packages register by entry point.

A package adds its own under the entry-point group "draftwood.strategies", as a callable that takes options as
keyword arguments and returns a `Strategy`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.metadata import entry_points
from inspect import signature
from typing import TypeVar

import numpy as np

from strategies.base import Feedback, Strategy
from strategies.draft import DraftTree

ENTRY_POINT_GROUP = "draftwood.strategies"

StrategyFactory = Callable[..., Strategy]
FactoryT = TypeVar("FactoryT", bound=StrategyFactory)

_NODES = 64
"""Draft nodes of a warm-up: more than an empty memory can fill, so that what fills unused ones is compiled too."""
_log = logging.getLogger(__name__)
_factories: dict[str, StrategyFactory] = {}
_entry_points_loaded = False


class UnknownStrategyError(LookupError):
    """No strategy has this name.

    Attributes:
        name: the unknown name.
        known: the registered names.
    """

    def __init__(self, name: str, known: list[str]) -> None:
        super().__init__(f"no strategy is named {name!r}; there are: {', '.join(known)}")
        self.name = name
        self.known = known


def register(name: str) -> Callable[[FactoryT], FactoryT]:
    """Decorator: makes a factory known by `name`, and returns it as it is.

    Raises:
        ValueError: the name is taken by another factory.
    """

    def add(factory: FactoryT) -> FactoryT:
        if _factories.setdefault(name, factory) is not factory:
            raise ValueError(f"strategy name {name!r} is taken by {_factories[name]!r}")
        return factory

    return add


def create(name: str, **options: object) -> Strategy:
    """A new strategy, with nothing learned.

    Raises:
        UnknownStrategyError: nothing is registered under `name`.
        TypeError: the strategy has no such option.
        ValueError: an option's value is not allowed.
    """
    _load_entry_points()
    if name not in _factories:
        raise UnknownStrategyError(name, strategy_names())
    return _factories[name](**options)


def options_of(name: str) -> frozenset[str]:
    """The names of the options that the strategy `name` takes.

    Raises:
        UnknownStrategyError: nothing is registered under `name`.
    """
    _load_entry_points()
    if name not in _factories:
        raise UnknownStrategyError(name, strategy_names())
    parameters = signature(_factories[name]).parameters.values()
    return frozenset(one.name for one in parameters if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD))


def warm_up(name: str) -> None:
    """Runs an instance once and drops it, so that functions that are compiled at the first call are ready."""
    strategy = create(name)
    drafter = strategy.start(np.zeros(4, np.int32))
    for token in range(4):
        drafter.observe(np.full(1, token, np.int32), _made_up_feedback(drafter.propose(_NODES), strategy.top_k))
    drafter.observe(np.zeros(4, np.int32), None)
    drafter.propose(_NODES)
    drafter.close()


def _made_up_feedback(tree: DraftTree, top_k: int) -> Feedback:
    """Feedback that accepts nothing of a tree."""
    nodes = 1 + len(tree)
    top = np.tile(np.arange(top_k, dtype=np.int32), (nodes, 1)) if top_k else None
    return Feedback(
        tokens=np.concatenate([np.zeros(1, np.int32), tree.tokens]),
        parents=np.concatenate([np.full(1, -1, np.int32), tree.parents + np.int32(1)]),
        predictions=np.zeros(nodes, np.int32),
        top_tokens=top,
    )


def strategy_names() -> list[str]:
    """All registered names, sorted."""
    _load_entry_points()
    return sorted(_factories)


def _load_entry_points() -> None:
    """Registers the strategies of other packages; one that cannot be imported is logged and left out."""
    global _entry_points_loaded
    if _entry_points_loaded:
        return
    _entry_points_loaded = True
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            register(entry_point.name)(entry_point.load())
        except Exception:
            _log.exception("strategy plugin %r (%s) could not be loaded", entry_point.name, entry_point.value)
