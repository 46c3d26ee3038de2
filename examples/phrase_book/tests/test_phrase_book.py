"""The phrase book on its own: no server, no model, nothing of Draftwood."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from draftwood_phrase_book import BookError, PhraseBook, PhraseBookStrategy, read_book
from draftwood_phrase_book.strategy import PhraseBookDrafter, Tree

THANKS = [11, 12, 13, 14, 15]
THANK_YOU_ALL = [11, 12, 13, 24, 25]


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def write_book(path: Path, *phrases: list[int]) -> str:
    path.write_text("# token ids\n\n" + "".join(" ".join(map(str, phrase)) + "\n" for phrase in phrases))
    return str(path)


@pytest.fixture
def strategy(tmp_path: Path) -> PhraseBookStrategy:
    return PhraseBookStrategy(book=write_book(tmp_path / "book.txt", THANKS, THANK_YOU_ALL))


def paths(tree: Tree) -> list[list[int]]:
    found: list[list[int]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        found.append([*(found[parent] if parent >= 0 else []), token])
    return found


def assert_valid(tree: Tree, budget: int) -> None:
    assert (tree.tokens.dtype, tree.parents.dtype, tree.scores.dtype) == (np.int32, np.int32, np.float32)
    assert len(tree.tokens) == len(tree.parents) == len(tree.scores) <= budget
    for node, parent in enumerate(tree.parents.tolist()):
        assert -1 <= parent < node
        assert 0.0 <= tree.scores[node] <= (tree.scores[parent] if parent >= 0 else 1.0)
    assert len(set(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))) == len(tree.tokens)


def test_a_phrase_that_was_begun_is_drafted_to_its_end(strategy: PhraseBookStrategy) -> None:
    drafter = strategy.start(ids(1, 2, 3))
    assert len(drafter.propose(8).tokens) == 0
    drafter.observe(ids(11, 12), None)
    tree = drafter.propose(8)
    assert_valid(tree, 8)
    assert paths(tree) == [[13], [13, 14], [13, 14, 15], [13, 24], [13, 24, 25]]
    drafter.observe(ids(13, 24), None)
    assert paths(drafter.propose(8)) == [[25]]
    drafter.close()


@pytest.mark.parametrize("budget", [1, 2, 4])
def test_a_draft_keeps_to_its_budget(strategy: PhraseBookStrategy, budget: int) -> None:
    tree = strategy.start(ids(11, 12)).propose(budget)
    assert_valid(tree, budget)
    assert len(tree.tokens) == budget


def test_the_prompt_is_text_as_well_and_a_longer_match_comes_first(tmp_path: Path) -> None:
    book = write_book(tmp_path / "book.txt", [5, 6, 7, 1], [4, 5, 6, 7, 2])
    tree = PhraseBookStrategy(book=book).start(ids(4, 5, 6, 7)).propose(8)
    assert_valid(tree, 8)
    assert paths(tree) == [[2], [1]]
    assert tree.scores[0] > tree.scores[1]


def test_scores_follow_what_comes_true(strategy: PhraseBookStrategy) -> None:
    def first_score(drafter: PhraseBookDrafter) -> float:
        drafter.observe(ids(0, 11, 12), None)
        return float(drafter.propose(1).scores[0])

    before = first_score(strategy.start(ids(1)))
    for _ in range(50):
        drafter = strategy.start(ids(11, 12))
        drafter.propose(4)
        drafter.observe(ids(99), None)
    assert first_score(strategy.start(ids(1))) < 0.5 * before


def test_the_book_is_found_by_the_variable_and_may_be_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PHRASE_BOOK", raising=False)
    assert len(PhraseBookStrategy().book) == 0
    assert len(PhraseBookStrategy().start(ids(1)).propose(4).tokens) == 0
    monkeypatch.setenv("PHRASE_BOOK", write_book(tmp_path / "book.txt", THANKS))
    assert len(PhraseBookStrategy().book) == 1


def test_a_phrase_no_longer_than_the_match_is_never_drafted() -> None:
    assert PhraseBook([[1, 2], []], least_match=2).matches([1, 2], 4) == []


@pytest.mark.parametrize(
    ("option", "value"), [("least_match", 0), ("least_match", 17), ("longest_draft", 0), ("longest_draft", 257)]
)
def test_options_are_checked(option: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{option}: {value} is not allowed; it must lie in"):
        PhraseBookStrategy(**{option: value})


@pytest.mark.parametrize("line", ["one two", "1 -2", "1,2", "99999999999"])
def test_a_bad_book_names_file_and_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "book.txt"
    path.write_text(f"1 2 3\n{line}\n")
    with pytest.raises(BookError, match=r"book\.txt, line 2"):
        read_book(path)
    with pytest.raises(BookError, match=r"absent\.txt"):
        read_book(tmp_path / "absent.txt")
