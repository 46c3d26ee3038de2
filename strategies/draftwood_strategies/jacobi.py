"""The jacobi strategy: each step generates new n-grams and verifies those of earlier steps.

Lookahead Decoding (ICML 2024, arXiv 2402.02057). A window of W columns and N - 1 levels runs a Jacobi iteration ahead
of the text: level 0 is a chain of guessed tokens under the last committed one, and from its node w hang the tokens
that earlier iterations found for column w, one level each. The model's predictions after the newest level complete W
n-grams a step. They go into a pool, and those that begin with the last committed token are verified in the next step.
Window and guesses are one tree, so a path of the window that happens to be right is accepted as well, and the model's
own token after the accepted path is kept.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np

from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.base import Feedback
from draftwood_strategies.built_in import JacobiOptions
from draftwood_strategies.draft import EMPTY_TREE, DraftTree, merged
from draftwood_strategies.native import compiled
from draftwood_strategies.tree_index import NO_NODE, TreeIndex, link_all, locate, unlinked

_RATE = 0.05
"""Weight of the latest step in the running averages of `GuessRates`."""
_FIRST_HIT, _NEXT_HIT, _WORTH = 0.1, 0.6, 0.02
"""Where the averages start; they lose half their weight in 14 steps."""
_LEAST_WORTH = 1e-4
"""Keeps the window's scores above 0, so that a budget may still admit it."""
_SEED = 2402
"""Of the window's first tokens, so that runs can be repeated."""


class JacobiStrategy:
    """One tenant's n-gram pool and acceptance rates; each sequence has a window and a pool of its own besides.

    Args:
        options: those of `JacobiOptions`, by name.

    Attributes:
        pool: the n-grams of all windows and outputs, none of a prompt. Guesses come from it where a sequence's own pool
            has fewer than G: the first sequence is drafted for as in the paper, later ones with longer acceptance.

    Raises:
        ValueError: an option's value is not allowed.
    """

    top_k = 0

    def __init__(self, **options: Any) -> None:
        self.options = JacobiOptions(**options)
        self.rates = GuessRates(self.options.ngram, self.options.guesses)
        self.pool = NgramPool(self.options.guesses, self.options.pool_keys)

    @property
    def nbytes(self) -> int:
        """Bytes of the pool, about."""
        return len(self.pool) * (
            sys.getsizeof((0,) * (self.options.ngram - 1)) + sys.getsizeof(1 << 20) * (self.options.ngram - 1)
        )

    def keep_learned(self, earlier: JacobiStrategy) -> None:
        """The pool holds text, and begins anew."""
        self.rates = earlier.rates

    def start(self, prompt: Int32Array) -> JacobiDrafter:
        return JacobiDrafter(self, prompt)

    def start_read_only(self, prompt: Int32Array) -> JacobiDrafter:
        return JacobiDrafter(self, prompt, learns=False)


class GuessRates:
    """Acceptance rates of guesses and of the window's nodes: running averages over a tenant's steps.

    Attributes:
        first: by age, the rate at which a guess's first token is accepted.
        later: by depth, the rate at which the next token is accepted after an accepted one.
        worth: accepted tokens of guesses in a step, for each node of the window.
    """

    def __init__(self, ngram: int, guesses: int) -> None:
        self.first = [_FIRST_HIT] * guesses
        self.later = [_NEXT_HIT] * (ngram - 2)
        self.worth = _WORTH

    def scores(self, age: int) -> list[float]:
        """The probability that each token of a guess is accepted; the newest guess has age 0."""
        return [*itertools.accumulate([self.first[age], *self.later], lambda path, rate: path * rate)]

    def observe(self, guesses: SequenceOf[tuple[int, ...]], window_nodes: int, accepted: list[int]) -> None:
        """Learns from a step that drafted `guesses`, the newest first, and wrote `accepted`."""
        longest = 0
        for age, guess in enumerate(guesses):
            right = 0
            for drafted, written in zip(guess, accepted, strict=False):
                if drafted != written:
                    break
                right += 1
            self.first[age] += _RATE * ((right > 0) - self.first[age])
            for depth in range(1, min(right + 1, len(guess), len(accepted))):
                self.later[depth - 1] += _RATE * ((right > depth) - self.later[depth - 1])
            longest = max(longest, right)
        if window_nodes:
            worth = min(longest, len(accepted) - 1) / window_nodes
            self.worth = min(1.0, max(_LEAST_WORTH, self.worth + _RATE * (worth - self.worth)))


class JacobiDrafter:
    """Drafts for one sequence; what it learns stays its own unless it `learns` for the tenant.

    Attributes:
        window: None where the budget is too small for one, and before the first draft.
        pool: the n-grams of the prompt and of the window.
    """

    def __init__(self, strategy: JacobiStrategy, prompt: Int32Array, learns: bool = True) -> None:
        self._strategy = strategy
        self._rates = strategy.rates if learns else copy.deepcopy(strategy.rates)
        self._prompt, self._indexed = prompt, 0
        self._last = int(prompt[-1])
        self._output: list[int] = []
        self._guesses: list[tuple[int, ...]] = []
        self._window_nodes = 0
        self.window: Window | None = None
        self.pool = NgramPool(strategy.options.guesses, strategy.options.pool_keys)
        self._learned = strategy.pool if learns else self.pool

    def index_prompt(self, max_tokens: int) -> int:
        """See `PromptIndexer`: counts n-grams."""
        n, begin = self._strategy.options.ngram, self._indexed
        ngrams = max(self._prompt.shape[0] - n + 1, 0)
        self._indexed = min(begin + max_tokens, ngrams)
        self.pool.add_all(self._prompt[begin : self._indexed + n - 1].tolist(), n)
        return self._indexed - begin

    def propose(self, budget: int) -> DraftTree:
        self.index_prompt(self._prompt.shape[0])
        strategy, rates, window = self._strategy, self._rates, EMPTY_TREE
        columns = min(strategy.options.window, (budget // 2 + 1) // (strategy.options.ngram - 1))
        if columns != (self.window.columns if self.window else 0):
            self.window = Window(columns, strategy.options.ngram, self._random_tokens()) if columns else None
        if self.window is not None:
            tokens, parents, _ = joined(self.window.paths())
            scores = np.full(tokens.shape[0], rates.worth, np.float32)
            window = merged([DraftTree(tokens, parents, scores)], budget)
        self._window_nodes = len(window)
        mine, others = (pool.after(self._last)[::-1] for pool in (self.pool, strategy.pool))
        self._guesses = [*mine, *(guess for guess in others if guess not in mine)][: strategy.options.guesses]
        tokens, parents, _ = joined(self._guesses)
        scores = np.array([score for age in range(len(self._guesses)) for score in rates.scores(age)], np.float32)
        return merged([window, DraftTree(tokens, parents, scores)], budget)

    def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
        written = accepted.tolist()
        self._rates.observe(self._guesses, self._window_nodes, written)
        if self.window is not None and feedback is not None:
            predictions = predictions_after(joined(self.window.paths()), feedback)
            if any(token is not None for token in predictions):
                for ngram in self.window.advance(self._last, predictions):
                    self.pool.add(ngram)
                    self._learned.add(ngram)
        self._output += written
        self._learned.add_all(self._output, self._strategy.options.ngram)
        self._output = self._output[1 - self._strategy.options.ngram :]
        self._last = written[-1]
        self._guesses, self._window_nodes = [], 0

    def close(self) -> None:
        """The tenant's pool keeps the n-grams."""

    def _random_tokens(self) -> Iterator[int]:
        """Tokens of the prompt, drawn for each window."""
        random = np.random.default_rng(_SEED)
        while True:
            yield from self._prompt[random.integers(0, self._prompt.shape[0], 64)].tolist()


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


class Window:
    """The Jacobi iteration ahead of one sequence.

    Args:
        columns: W, at least 1.
        n: the length of the n-grams that it makes, at least 3.
        tokens: the first level's tokens and those of columns that were not verified, without end.

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
            last: the token under which the window was drafted.
            predictions: the model's token after each of `paths`; None where the path was not verified.

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


class Paths(NamedTuple):
    """Paths one after the other, laid out as a draft tree with equal siblings.

    Attributes:
        tokens, parents: int32[n].
        ends: int32[p], the last node of each path.
    """

    tokens: Int32Array
    parents: Int32Array
    ends: Int32Array


def joined(paths: Iterable[SequenceOf[int]]) -> Paths:
    """The tree of paths of one token or more."""
    tokens: list[int] = []
    parents: list[int] = []
    ends: list[int] = []
    for path in paths:
        parents += [NO_NODE, *range(len(tokens), len(tokens) + len(path) - 1)]
        tokens += path
        ends.append(len(tokens) - 1)
    return Paths(np.array(tokens, np.int32), np.array(parents, np.int32), np.array(ends, np.int32))


def predictions_after(paths: Paths, feedback: Feedback) -> list[int | None]:
    """The model's token after each path; None where it was not verified: the tree may have been pruned."""
    located = np.empty(paths.tokens.shape[0], np.int32)
    _locate(unlinked(feedback.tokens), feedback.parents, paths.tokens, paths.parents, located)
    nodes = located[paths.ends]
    predicted = feedback.predictions[nodes].tolist()
    return [token if node >= 0 else None for node, token in zip(nodes.tolist(), predicted, strict=True)]


@compiled
def _locate(
    verified: TreeIndex, verified_parents: Int32Array, tokens: Int32Array, parents: Int32Array, located: Int32Array
) -> None:
    link_all(verified, verified_parents)
    locate(verified, 0, tokens, parents, located)
