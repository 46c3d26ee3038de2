"""The jacobi strategy: the model guesses n-grams for itself, beside verifying those that it guessed before.

Lookahead Decoding (ICML 2024, arXiv 2402.02057). A window of W columns and N - 1 levels runs a Jacobi iteration ahead
of the text: level 0 is a chain of guessed tokens under the last committed one, and from its node w hang the tokens
that earlier iterations found for column w, one level each. What the model says after the newest level completes W
n-grams a step. They go into a pool, and those that begin with the last committed token are verified in the next step.
Window and guesses are one tree, so a path of the window that happens to be right is accepted as well, and the model's
own token after the accepted path is kept.
"""

from __future__ import annotations

import itertools
import sys
from collections import OrderedDict, deque
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

import numpy as np

from strategies.base import Feedback
from strategies.draft import DraftTree, Int32Array
from strategies.jacobi.path_tree import PathPredictions, PathTree
from strategies.registry import register

_RATE = 0.05
_FIRST_HIT, _NEXT_HIT = 0.1, 0.6
_WORTH, _LEAST_WORTH = 0.02, 1e-4
_SEED = 2402


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
        """What may follow a token, the newest last."""
        return [*self._rests.get(token, ())]


class Window:
    """The Jacobi iteration ahead of one sequence.

    Args:
        columns: W, at least 1.
        n: the length of the n-grams that it makes, at least 3.
        tokens: what guesses are drawn from at first, without end.

    Attributes:
        levels: level 0 holds W - 1 tokens, levels 1 to N - 2 hold W each, the newest last. While the window fills
            there are fewer levels, and they are longer.
    """

    def __init__(self, columns: int, n: int, tokens: Iterator[int]) -> None:
        self.columns = columns
        self._n = n
        self._tokens = tokens
        self.levels = [[*itertools.islice(tokens, columns + n - 3)]]

    def paths(self) -> list[list[int]]:
        """The tokens from the last committed one to each node of the newest level, column by column."""
        chain, *others = self.levels
        if not others:
            return [chain[: w + 1] for w in range(len(chain))]
        return [chain[:w] + [level[w] for level in others] for w in range(len(others[-1]))]

    def advance(self, last: int, predictions: SequenceOf[int | None]) -> list[list[int]]:
        """Moves on by one iteration.

        Args:
            last: the token that the window hung from.
            predictions: what the model says after each of `paths`; None where it was not asked.

        Returns:
            The n-grams that are complete now, one a column.
        """
        new = [next(self._tokens) if token is None else token for token in predictions]
        chain, *others = self.levels
        if len(self.levels) < self._n - 1:
            self.levels = [level[1:] for level in self.levels] + [new[1:] if others else new]
            return []
        keys = [last, *chain]
        ngrams = [[keys[w], *(level[w] for level in others), new[w]] for w in range(len(new))]
        self.levels = [others[0][1:], *others[1:], new]
        return [ngram for ngram, token in zip(ngrams, predictions, strict=True) if token is not None]


@register("jacobi")
class JacobiStrategy:
    """What a tenant's sequences found for one another, beside the window and the pool that each has of its own.

    Args:
        window: W, the columns of the window, 1 to 64. A draft takes at most half its budget for the window, which is
            narrower where W columns do not fit.
        ngram: N, the length of the n-grams, 3 to 16.
        guesses: G, how many n-grams are verified in a step at most, 1 to 64.
        pool_keys: how many tokens a pool holds n-grams of, 1 to 2^20.

    Attributes:
        pool: the n-grams of all windows and outputs, none of a prompt. Guesses come from it where a sequence's own pool
            has fewer than G, so that a first sequence is drafted for as in the paper, and later ones better.

    Raises:
        ValueError: an option's value is not allowed.
    """

    top_k = 0

    def __init__(self, *, window: int = 10, ngram: int = 5, guesses: int = 10, pool_keys: int = 4096) -> None:
        for name, value, least, greatest in (
            ("window", window, 1, 64),
            ("ngram", ngram, 3, 16),
            ("guesses", guesses, 1, 64),
            ("pool_keys", pool_keys, 1, 1 << 20),
        ):
            if not least <= value <= greatest:
                raise ValueError(f"{name}: {value} is not allowed; it must lie in [{least}, {greatest}]")
        self.window, self.ngram, self.guesses, self.pool_keys = window, ngram, guesses, pool_keys
        self.rates = GuessRates(ngram, guesses)
        self.pool = NgramPool(guesses, pool_keys)

    @property
    def nbytes(self) -> int:
        """Bytes of the pool, about."""
        return len(self.pool) * (sys.getsizeof((0,) * (self.ngram - 1)) + sys.getsizeof(1 << 20) * (self.ngram - 1))

    def start(self, prompt: Int32Array) -> JacobiDrafter:
        return JacobiDrafter(self, prompt)


class GuessRates:
    """How often guesses come true, and what a node of the window brings: averages over a tenant's latest steps.

    Attributes:
        first: by age, how often a guess's first token is right.
        later: by depth, how often the next token is right after a right one.
        worth: tokens that guesses bring a step, for each node that the window takes in it.
    """

    def __init__(self, ngram: int, guesses: int) -> None:
        self.first = [_FIRST_HIT] * guesses
        self.later = [_NEXT_HIT] * (ngram - 2)
        self.worth = _WORTH

    def scores(self, age: int) -> list[float]:
        """The probability that each token of a guess is accepted; the newest guess has age 0."""
        return [*itertools.accumulate([self.first[age], *self.later], lambda path, rate: path * rate)]

    def observe(self, guesses: SequenceOf[tuple[int, ...]], window_nodes: int, accepted: list[int]) -> None:
        """Learns from a step, where `guesses` were drafted, the newest first, and `accepted` was written."""
        most = 0
        for age, guess in enumerate(guesses):
            right = 0
            for drafted, written in zip(guess, accepted, strict=False):
                if drafted != written:
                    break
                right += 1
            self.first[age] += _RATE * ((right > 0) - self.first[age])
            for depth in range(1, min(right + 1, len(guess), len(accepted))):
                self.later[depth - 1] += _RATE * ((right > depth) - self.later[depth - 1])
            most = max(most, right)
        if window_nodes:
            brought = min(most, len(accepted) - 1) / window_nodes
            self.worth = min(1.0, max(_LEAST_WORTH, self.worth + _RATE * (brought - self.worth)))


class JacobiDrafter:
    """Drafts for one sequence.

    Attributes:
        window: None where the budget has no room for one, and before the first draft.
        pool: the n-grams of the prompt and of the window.
    """

    def __init__(self, strategy: JacobiStrategy, prompt: Int32Array) -> None:
        self._strategy = strategy
        self._prompt = prompt
        self._last = int(prompt[-1])
        self._output: list[int] = []
        self._guesses: list[tuple[int, ...]] = []
        self._window_nodes = 0
        self.window: Window | None = None
        self.pool = NgramPool(strategy.guesses, strategy.pool_keys)
        self.pool.add_all(prompt.tolist(), strategy.ngram)

    def propose(self, budget: int) -> DraftTree:
        strategy, rates, draft = self._strategy, self._strategy.rates, PathTree(budget)
        columns = min(strategy.window, (budget // 2 + 1) // (strategy.ngram - 1))
        if columns != (self.window.columns if self.window else 0):
            self.window = Window(columns, strategy.ngram, self._random_tokens()) if columns else None
        if self.window is not None:
            for path in self.window.paths():
                draft.add(path, itertools.repeat(rates.worth))
        self._window_nodes = len(draft.tokens)
        own, others = (pool.after(self._last)[::-1] for pool in (self.pool, strategy.pool))
        self._guesses = [*own, *(guess for guess in others if guess not in own)][: strategy.guesses]
        for age, guess in enumerate(self._guesses):
            draft.add(guess, rates.scores(age))
        return draft.tree()

    def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
        written = accepted.tolist()
        self._strategy.rates.observe(self._guesses, self._window_nodes, written)
        if self.window is not None and feedback is not None:
            predicted = PathPredictions(feedback)
            predictions = [predicted.after(path) for path in self.window.paths()]
            if any(token is not None for token in predictions):
                for ngram in self.window.advance(self._last, predictions):
                    self.pool.add(ngram)
                    self._strategy.pool.add(ngram)
        self._output += written
        self._strategy.pool.add_all(self._output, self._strategy.ngram)
        self._output = self._output[1 - self._strategy.ngram :]
        self._last = written[-1]
        self._guesses, self._window_nodes = [], 0

    def close(self) -> None:
        """What was found and written stays in the tenant's pool."""

    def _random_tokens(self) -> Iterator[int]:
        """Tokens of the prompt, drawn anew for each window."""
        random = np.random.default_rng(_SEED)
        while True:
            yield from self._prompt[random.integers(0, self._prompt.shape[0], 64)].tolist()
