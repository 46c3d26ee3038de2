"""The book: phrases as token ids, and which of them may go on after a text. Knows nothing of drafts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple


class BookError(ValueError):
    """A book cannot be read; the message names the file, the line and what is wrong."""


class Match(NamedTuple):
    """A phrase that the text has begun.

    Attributes:
        length: how many of its tokens the text ends with.
        rest: the tokens after those, at least one.
    """

    length: int
    rest: tuple[int, ...]


class PhraseBook:
    """Phrases that can be looked up by any `least_match` neighbouring tokens of theirs."""

    def __init__(self, phrases: Iterable[Sequence[int]], least_match: int) -> None:
        self._least = least_match
        self._phrases = [tuple(phrase) for phrase in phrases]
        self._places: defaultdict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
        for number, phrase in enumerate(self._phrases):
            for end in range(least_match, len(phrase)):
                self._places[phrase[end - least_match : end]].append((number, end))

    def __len__(self) -> int:
        return len(self._phrases)

    def matches(self, text: Sequence[int], most: int) -> list[Match]:
        """At most `most` phrases that `text` may be in the midst of, the longest match first."""
        found = self._places.get(tuple(text[-self._least :]), ())
        matches = [Match(self._match(text, number, end), self._phrases[number][end:]) for number, end in found]
        return sorted(matches, key=lambda match: -match.length)[:most]

    def _match(self, text: Sequence[int], number: int, end: int) -> int:
        """How many tokens before `end` of a phrase are the last ones of the text."""
        phrase, length = self._phrases[number], self._least
        while length < min(end, len(text)) and phrase[end - length - 1] == text[-length - 1]:
            length += 1
        return length


def read_book(path: Path) -> list[tuple[int, ...]]:
    """The phrases of a text file: one a line, as token ids between blanks. Empty lines and those with # are skipped.

    Raises:
        BookError: the file cannot be read, or a line is no phrase.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BookError(f"{path}: {error}") from error
    phrases = []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            ids = line.split()
            if not all(one.isascii() and one.isdigit() and int(one) < 2**31 for one in ids):
                raise BookError(f"{path}, line {number}: it must hold token ids between blanks, not {line.strip()!r}")
            phrases.append(tuple(map(int, ids)))
    return phrases
