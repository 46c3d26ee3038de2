"""The strategies that a hybrid is made of, by the names in its option `sources`."""

from __future__ import annotations

from draftwood_strategies.base import Strategy, SuccessorSource
from draftwood_strategies.registry import create, options_of
from draftwood_strategies.successors import WIDTH, SuccessorTable


def names_in(sources: str) -> list[str]:
    """The names in the option, which are separated by commas.

    Raises:
        ValueError: one is there twice, or is the hybrid itself.
    """
    names = [name.strip() for name in sources.split(",")]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"sources: {sources!r} names a strategy twice")
    if "hybrid" in names:
        raise ValueError(f"sources: {sources!r} names hybrid, which cannot be a source of itself")
    return names


def parts_of(sources: str, options: dict[str, object]) -> dict[str, Strategy]:
    """The strategies that `sources` names, each made with the options that it has.

    Raises:
        UnknownStrategyError: a source is not registered.
        TypeError: no part has an option.
        ValueError: an option's value, or `sources`, is not allowed.
    """
    names = names_in(sources)
    known = {name: options_of(name) for name in names}
    unknown = set(options).difference(*known.values())
    if unknown:
        raise TypeError(f"none of the sources {', '.join(names)} has an option {min(unknown)!r}")
    return {name: create(name, **{k: v for k, v in options.items() if k in known[name]}) for name in names}


def table_of(name: str, part: SuccessorSource) -> SuccessorTable:
    """The successor table of a part.

    Raises:
        ValueError: the part's `top_k` does not fit, or it is another kind of table.
    """
    if part.top_k < WIDTH:
        raise ValueError(f"sources: {name!r} has a successor table, so its top_k must be at least {WIDTH}")
    if not isinstance(part.successors, SuccessorTable):
        raise ValueError(f"sources: {name!r}: its successors must be a SuccessorTable")
    return part.successors
