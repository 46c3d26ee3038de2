"""Strategies by name: the built-in ones, and those that other packages register by entry point.

A package adds its own under the entry-point group "draftwood.strategies", as a callable that takes options as
keyword arguments and returns a `Strategy`. Names, options and their checks need no built-in strategy's code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from draftwood_strategies.built_in import BUILT_IN, LOADED_BY, BuiltIn, HybridOptions, ModelDraftOptions
from draftwood_strategies.options import Option, OptionValue, check, read_options

if TYPE_CHECKING:
    from draftwood_strategies.base import Feedback, Strategy
    from draftwood_strategies.draft import DraftTree

ENTRY_POINT_GROUP = "draftwood.strategies"

StrategyFactory: TypeAlias = "Callable[..., Strategy]"
Substitute: TypeAlias = "Callable[..., Strategy | None]"
FactoryT = TypeVar("FactoryT", bound=StrategyFactory)

_NODES = 64
"""Draft nodes of a warm-up: more than an empty memory can fill, so that what fills unused ones is compiled too."""
_log = logging.getLogger(__name__)
_factories: dict[str, StrategyFactory] = {**BUILT_IN}
_offered: list[str] = []
_elsewhere: list[str] = []
_substitutes: dict[str, tuple[Substitute, bool]] = {}
_entry_points_loaded = False


class UnknownStrategyError(LookupError):
    """No strategy has this name.

    Attributes:
        name: the unknown name.
        known: the registered names.
    """

    def __init__(self, name: str, known: list[str]) -> None:
        super().__init__(f"no strategy is named {name!r}; there are: {', '.join(known)}{how_loaded(name)}")
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
    """A new strategy, with nothing learned. In `substituted` it may be another form of the one of this name.

    Raises:
        UnknownStrategyError: nothing is registered under `name`.
        TypeError: the strategy has no such option.
        ValueError: an option's value is not allowed.
    """
    return _created(name, options, of_source=False)


def create_source(name: str, options: Mapping[str, object]) -> Strategy:
    """As `create`, of a source of a hybrid."""
    return _created(name, options, of_source=True)


def _created(name: str, options: Mapping[str, object], of_source: bool) -> Strategy:
    make, as_source = _substitutes.get(name, (None, False))
    made = None if make is None or (of_source and not as_source) else make(**options)
    return _factory(name)(**options) if made is None else made


@contextmanager
def substituted(name: str, make: Substitute, as_source: bool = True) -> Iterator[None]:
    """In it `create`, on any thread, returns what `make` does for the options of the strategy `name`, if not None.

    Args:
        as_source: `create_source` does, too.
    """
    _substitutes[name] = make, as_source
    try:
        yield
    finally:
        del _substitutes[name]


@contextmanager
def offered(name: str, make: StrategyFactory) -> Iterator[None]:
    """In it there is a strategy `name` that drafts by a model of this process; a hybrid has it as a source by default.

    Args:
        make: takes the options of `ModelDraftOptions`.

    Raises:
        ValueError: the name is taken.
    """
    if _factories.get(name, _made_elsewhere) not in (make, _made_elsewhere):
        raise ValueError(f"strategy name {name!r} is taken by {_factories[name]!r}")
    _factories[name] = make
    _offered.append(name)
    try:
        yield
    finally:
        _offered.remove(name)
        del _factories[name]
        know_offered(_elsewhere)


def know_offered(names: Iterable[str]) -> None:
    """Sets which strategies another process offers by its models: here their names and options are known, and they
    cannot be made. A process that asks that one calls it."""
    for name in [name for name, make in _factories.items() if make is _made_elsewhere]:
        del _factories[name]
    _elsewhere[:] = [*names]
    for name in _elsewhere:
        _factories.setdefault(name, _made_elsewhere)


def _made_elsewhere(**options: object) -> Strategy:
    raise LookupError("it drafts by a model of another process")


def _by_models() -> list[str]:
    """The strategies that draft by models, of this process or another."""
    return [*dict.fromkeys([*_offered, *_elsewhere])]


def how_loaded(name: str) -> str:
    """What an error adds on a strategy that is not there because no model was loaded for it; else nothing."""
    return f"; {name} is there if `draftwood serve` has {LOADED_BY[name]}" if name in LOADED_BY else ""


def default_sources() -> str:
    """The sources of a hybrid that names none."""
    return ",".join([HybridOptions.sources, *_by_models()])


def options_of(name: str, given: Mapping[str, OptionValue] = MappingProxyType({})) -> Mapping[str, Option]:
    """The options that the strategy `name` takes, by name.

    Args:
        given: values that decide which others there are: a hybrid has those of its `sources`.

    Raises:
        UnknownStrategyError: nothing is registered under `name`, or a strategy that `given` names.
        ValueError: a value in `given` is not allowed.
    """
    factory = _factory(name)
    if name in _by_models():
        return read_options(ModelDraftOptions)
    if isinstance(factory, BuiltIn):
        options = read_options(factory.kind)
        return options if factory.kind is not HybridOptions else {**options, **_options_of_sources(_sources(given))}
    offered = getattr(factory, "options", None)
    return read_options(factory) if offered is None else offered(given)


def _options_of_sources(names: list[str]) -> dict[str, Option]:
    return {name: option for source in names for name, option in options_of(source).items()}


def _sources(given: Mapping[str, OptionValue]) -> list[str]:
    """The sources of a hybrid with these options."""
    sources = given.get("sources", default_sources())
    return HybridOptions(sources=str(read_options(HybridOptions)["sources"].checked(sources))).names()


def check_options(name: str, options: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """The options in their types, if the strategy accepts them all. What only an instance knows of a strategy of
    another package, an instance is made for, and dropped.

    Raises:
        UnknownStrategyError: nothing is registered under `name`, or it is the name of a source in `options`.
        ValueError: an option is unknown, or a value not allowed; the text begins with the option's name.
    """
    checked = check(options_of(name, options), options)
    factory, names = _factory(name), [name]
    if isinstance(factory, BuiltIn) and factory.kind is HybridOptions:
        names += _sources(checked)
    by_models = _by_models()
    if not all(part in by_models or isinstance(_factory(part), BuiltIn) for part in names):
        create(name, **checked)
    return checked


def _factory(name: str) -> StrategyFactory:
    _load_entry_points()
    if name not in _factories:
        raise UnknownStrategyError(name, strategy_names())
    return _factories[name]


def warm_up(name: str) -> None:
    """Runs an instance once and drops it, so that functions that are compiled at the first call are ready."""
    import numpy as np  # what reads names and options alone does without

    strategy = create(name)
    drafter = strategy.start(np.zeros(4, np.int32))
    for token in range(4):
        drafter.observe(np.full(1, token, np.int32), _dummy_feedback(drafter.propose(_NODES), strategy.top_k))
    drafter.observe(np.zeros(4, np.int32), None)
    drafter.propose(_NODES)
    drafter.close()


def _dummy_feedback(tree: DraftTree, top_k: int) -> Feedback:
    """Feedback that accepts nothing of a tree."""
    import numpy as np

    from draftwood_strategies.base import Feedback

    nodes = 1 + tree.tokens.size  # a plugin's tree need not be a DraftTree
    top = np.tile(np.arange(top_k, dtype=np.int32), (nodes, 1)) if top_k else None
    return Feedback(
        tokens=np.concatenate([np.zeros(1, np.int32), tree.tokens]),
        parents=np.concatenate([np.full(1, -1, np.int32), tree.parents + np.int32(1)]),
        predictions=np.zeros(nodes, np.int32),
        top_tokens=top,
    )


def strategy_names() -> list[str]:
    """All registered names, sorted, but those that begin with an underscore: no request can choose them."""
    _load_entry_points()
    return sorted(name for name in _factories if not name.startswith("_"))


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
