"""Strategies by name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import numpy as np
import pytest

from draftwood_errors import InvalidValueError
from draftwood_strategies import (
    NoDrafts,
    Strategy,
    TrieStrategy,
    UnknownStrategyError,
    create,
    register,
    registry,
    strategy_names,
)
from draftwood_strategies.base import Drafter
from draftwood_strategies.draft import checked
from draftwood_strategies.drafting import require_strategy
from tests import phrase_book
from tests.strategies.fakes import FakeStrategy


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes what a test registers."""
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    monkeypatch.setattr(registry, "_entry_points_loaded", False)


def test_a_built_in_strategy_is_found_by_name_and_gets_its_options() -> None:
    strategy = create("trie", branch_length=5)
    assert isinstance(strategy, TrieStrategy)
    assert strategy.options.branch_length == 5


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownStrategyError, match=r"'tire'.*none, .*trie") as caught:
        create("tire")
    assert caught.value.name == "tire"
    assert "trie" in caught.value.known


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """Undoes what a test says of another process."""
    yield
    registry.know_offered([])


@pytest.mark.usefixtures("elsewhere")
def test_what_another_process_offers_is_known_and_not_made() -> None:
    registry.know_offered(["head", "draft_model"])
    assert {"head", "draft_model"} <= {*strategy_names()}
    assert registry.check_options("head", {"depth": 3}) == {"depth": 3}
    with pytest.raises(ValueError, match="depth"):
        registry.check_options("head", {"depth": 17})
    assert registry.default_sources() == "trie,recycling,head,draft_model"
    assert "depth" in registry.options_of("hybrid")
    assert "depth" not in registry.options_of("hybrid", {"sources": "trie,recycling"})
    assert registry.check_options("hybrid", {"sources": "head", "depth": 2})["depth"] == 2
    with pytest.raises(LookupError, match="another process"):
        create("head")
    registry.know_offered(["draft_model"])
    assert "head" not in strategy_names()


@pytest.mark.usefixtures("elsewhere")
def test_a_process_that_has_the_model_makes_what_is_known_elsewhere() -> None:
    registry.know_offered(["head"])
    with registry.offered("head", NoDrafts):
        registry.know_offered([])
        assert isinstance(create("head"), NoDrafts)
        with pytest.raises(ValueError, match="'trie' is taken"), registry.offered("trie", NoDrafts):
            pass
        registry.know_offered(["head"])
        assert registry.default_sources() == "trie,recycling,head"
    with pytest.raises(LookupError, match="another process"):
        create("head")
    registry.know_offered([])
    assert "head" not in strategy_names()


@pytest.mark.parametrize("name", ["head", "draft_model"])
def test_a_strategy_without_its_model_is_unknown_and_the_error_names_the_flag(name: str) -> None:
    flag = f"--{'draft-head' if name == 'head' else 'draft-model'}"
    for make in (create, registry.options_of):
        with pytest.raises(UnknownStrategyError, match=rf"trie; {name} is there if `draftwood serve` has {flag}"):
            make(name)
    with pytest.raises(InvalidValueError, match=rf"one of .*trie; {name} is there if `draftwood serve` has {flag}"):
        require_strategy("drafting.strategy", name)


@pytest.mark.usefixtures("own_registry")
def test_a_plugin_with_a_tree_of_its_own_is_warmed_up() -> None:
    parents = np.arange(-1, 2, dtype=np.int32)
    plugin = FakeStrategy(SimpleNamespace(tokens=parents + 5, parents=parents, scores=np.ones(3, np.float32)))
    register("theirs")(lambda: plugin)
    registry.warm_up("theirs")
    assert (plugin.proposed, plugin.observed, plugin.closed) == (5, 5, 1)


@pytest.mark.usefixtures("own_registry")
def test_register_returns_the_factory_and_refuses_a_taken_name() -> None:
    """A name with an underscore is the program's own: it is not listed."""
    for name in ("mine", "mine", "_own"):
        assert register(name)(NoDrafts) is NoDrafts
        assert isinstance(create(name), NoDrafts)
    assert {"mine", "_own"} & {*strategy_names()} == {"mine"}
    with pytest.raises(ValueError, match="'mine' is taken"):
        register("mine")(TrieStrategy)


@pytest.mark.usefixtures("own_registry")
def test_other_packages_bring_strategies_by_entry_point_and_a_broken_one_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = [
        EntryPoint("theirs", "draftwood_strategies.none:NoDrafts", registry.ENTRY_POINT_GROUP),
        EntryPoint("broken", "no_such_module:nothing", registry.ENTRY_POINT_GROUP),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: found if group == registry.ENTRY_POINT_GROUP else [])
    assert isinstance(create("theirs"), NoDrafts)
    assert "broken" not in strategy_names()
    assert "'broken'" in caplog.text


def test_the_example_plugin_is_found_by_what_its_package_declares_and_fits_the_protocols(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    phrase_book.install(monkeypatch)
    assert phrase_book.NAME in strategy_names()
    strategy = phrase_book.create(phrase_book.NAME, [[1, 2, 3, 4]])
    drafter = strategy.start(np.array([1, 2], np.int32))
    assert isinstance(strategy, Strategy)
    assert isinstance(drafter, Drafter)
    assert checked(drafter.propose(8), 8, 100).tokens.tolist() == [3, 4]
    assert set(registry.options_of(phrase_book.NAME)) == {"book", "least_match", "longest_draft"}


def test_the_example_plugin_imports_nothing_of_ours() -> None:
    for path in (phrase_book.PROJECT / "draftwood_phrase_book").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            assert not module.startswith("draftwood") or module.startswith("draftwood_phrase_book"), path
