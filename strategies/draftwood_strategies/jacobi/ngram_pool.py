"""The n-gram pool of Lookahead Decoding: what followed a token before."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence as SequenceOf


class NgramPool:
    """N-grams by their first token, those of a token and the tokens themselves the most recently seen last.

    Args:
        guesses: n-grams of one token at most.
        keys: tokens at most; the one seen longest ago leaves first.
    """

    def __init__(self, guesses: int, keys: int) -> None:
        self._guesses = guesses
        self._keys = keys
        self._rests: OrderedDict[int, deque[tuple[int, ...]]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._rests.values()))

    def add(self, ngram: SequenceOf[int]) -> None:
        """Adds an n-gram, or makes it the newest of its first token."""
        key, rest = ngram[0], tuple(ngram[1:])
        rests = self._rests.setdefault(key, deque(maxlen=self._guesses))
        if rest in rests:
            rests.remove(rest)
        rests.append(rest)
        self._rests.move_to_end(key)
        if len(self._rests) > self._keys:
            self._rests.popitem(last=False)

    def add_all(self, tokens: SequenceOf[int], n: int) -> None:
        """Adds every n-gram of a text."""
        for start in range(len(tokens) - n + 1):
            self.add(tokens[start : start + n])

    def after(self, token: int) -> list[tuple[int, ...]]:
        """The n-grams that begin with a token, without it, the newest last."""
        return [*self._rests.get(token, ())]
