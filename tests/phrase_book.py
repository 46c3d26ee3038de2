"""The example plugin, made known as the entry point of an installed package is: by what its pyproject.toml declares."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import draftwood_strategies
from draftwood_strategies import Strategy, registry

PROJECT = Path(__file__).parents[1] / "examples" / "phrase_book"
NAME = "phrase_book"


def declared() -> list[EntryPoint]:
    """The strategies that the package brings."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    group: dict[str, str] = project["entry-points"][registry.ENTRY_POINT_GROUP]
    return [EntryPoint(name, value, registry.ENTRY_POINT_GROUP) for name, value in group.items()]


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the registry find the plugin, until the end of the test."""
    found = declared()
    monkeypatch.setattr(registry, "_factories", {k: v for k, v in registry._factories.items() if k != NAME})
    monkeypatch.setattr(registry, "_entry_points_loaded", False)
    monkeypatch.setattr(registry, "entry_points", lambda group: found if group == registry.ENTRY_POINT_GROUP else [])


def create(name: str, phrases: Iterable[Sequence[int]]) -> Strategy:
    """A new strategy; the plugin with a book of these phrases."""
    if name != NAME:
        return draftwood_strategies.create(name)
    with TemporaryDirectory() as folder:
        book = Path(folder) / "book.txt"
        book.write_text("".join(" ".join(map(str, phrase)) + "\n" for phrase in phrases), encoding="utf-8")
        return draftwood_strategies.create(NAME, book=str(book))
