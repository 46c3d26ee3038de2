"""The options of strategies: what is accepted, and what is said of what is not."""

from __future__ import annotations

from typing import Any

import pytest

from draftwood_strategies.options import Option, Range, check, read_options
from draftwood_strategies.registry import UnknownStrategyError, check_options, create
from tests import phrase_book

ACCEPTED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("trie", {"branch_length": 8.0, "learn": "both"}, {"branch_length": 8, "learn": "both"}),
    ("trie", {"prompt_weight": 2, "capacity_tokens": 4096.0}, {"prompt_weight": 2.0, "capacity_tokens": 4096}),
    ("hybrid", {"branch_length": 8.0, "capacity_contexts": 2048.0}, {"branch_length": 8, "capacity_contexts": 2048}),
    ("hybrid", {"sources": "jacobi, trie", "window": 4.0}, {"sources": "jacobi, trie", "window": 4}),
    (phrase_book.NAME, {"least_match": 3.0}, {"least_match": 3}),
    ("none", {}, {}),
]

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("trie", {"branch_length": 0}, r"branch_length: 0 is not allowed; it must lie in \[1, 256\]"),
    ("trie", {"branch_length": 2.5}, "branch_length: 2.5 is not allowed; it must be a whole number"),
    ("trie", {"branch_length": True}, "branch_length: True is not allowed; it must be a whole number"),
    ("trie", {"branch_length": "8"}, "branch_length: '8' is not allowed; it must be a whole number"),
    ("trie", {"branch_length": float("inf")}, "branch_length: inf is not allowed"),
    ("trie", {"learn": "all"}, "learn: 'all' is unknown; the values are outputs, prompts, both"),
    ("trie", {"learn": 1}, "learn: 1 is not allowed; it must be text"),
    ("trie", {"prompt_weight": 0}, r"prompt_weight: 0.0 is not allowed; it must lie in \(0, 1000\)"),
    ("trie", {"prompt_weight": float("nan")}, "prompt_weight: nan is not allowed; it must be a number"),
    ("trie", {"capacity_tokens": 63}, "capacity_tokens: 63 is not allowed; it must be at least 64"),
    ("trie", {"brnch": 1}, "brnch: there is no such option; there are: branch_length, capacity_tokens, learn"),
    ("hybrid", {"branch_length": 999}, "branch_length: 999"),
    ("hybrid", {"window": 4}, "window: there is no such option; there are: branch_length, capacity_contexts"),
    ("hybrid", {"sources": "trie,trie"}, "sources: 'trie,trie' names a strategy twice"),
    ("hybrid", {"sources": "hybrid"}, "sources: 'hybrid' names hybrid"),
    ("hybrid", {"sources": 3}, "sources: 3 is not allowed; it must be text"),
    (phrase_book.NAME, {"least_match": "two"}, "least_match: 'two' is not allowed; it must be a whole number"),
    ("none", {"anything": 1}, "anything: there is no such option; there are: none"),
]


@pytest.fixture(autouse=True)
def _plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    phrase_book.install(monkeypatch)


@pytest.mark.parametrize(("name", "given", "expected"), ACCEPTED)
def test_values_get_the_types_of_their_options(name: str, given: dict[str, Any], expected: dict[str, Any]) -> None:
    checked = check_options(name, given)
    assert checked == expected
    assert [type(value) for value in checked.values()] == [type(value) for value in expected.values()]


@pytest.mark.parametrize(("name", "given", "message"), REFUSED)
def test_what_is_refused_is_named_first(name: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        check_options(name, given)


@pytest.mark.parametrize(("name", "given"), [("nothing", {}), ("hybrid", {"sources": "trie,nothing"})])
def test_a_strategy_that_does_not_exist(name: str, given: dict[str, Any]) -> None:
    with pytest.raises(UnknownStrategyError, match="'nothing'"):
        check_options(name, given)


@pytest.mark.parametrize(
    ("name", "option"),
    [("jacobi", "window"), ("jacobi", "ngram"), ("jacobi", "guesses"), ("jacobi", "pool_keys"),
     ("recycling", "capacity_contexts"), ("trie", "branch_length"), ("hybrid", "branch_length")],
)  # fmt: skip
def test_a_strategy_that_is_made_directly_checks_its_options(name: str, option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}: 0 is not allowed; it must"):
        create(name, **{option: 0})


def test_a_range_may_have_no_lower_bound() -> None:
    with pytest.raises(ValueError, match=r"^depth: 6 is not allowed; it must be below 6$"):
        Option("depth", int, 3, Range(maximum=6, open=True)).checked(6)


def test_a_factory_whose_annotations_are_missing_or_cannot_be_evaluated_takes_any_value() -> None:
    def bare(depth=3):  # type: ignore[no-untyped-def]
        return depth

    def odd(depth: NotImported = 3) -> int:  # type: ignore[name-defined]  # noqa: F821
        return int(depth)

    assert read_options(bare)["depth"] == Option("depth", None, 3)
    for make in (bare, odd):
        assert check(read_options(make), {"depth": "deep"}) == {"depth": "deep"}
