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
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import Annotated

import numpy as np

from draftwood_strategies.base import Feedback
from draftwood_strategies.draft import EMPTY_TREE, DraftTree, merged
from draftwood_strategies.jacobi.ngram_pool import NgramPool
from draftwood_strategies.jacobi.paths import joined, predictions_after
from draftwood_strategies.jacobi.window import Window
from draftwood_strategies.native import Int32Array
from draftwood_strategies.options import Range, check, read_options
from draftwood_strategies.registry import register

_RATE = 0.05
"""Weight of the latest step in the running averages of `GuessRates`."""
_FIRST_HIT, _NEXT_HIT, _WORTH = 0.1, 0.6, 0.02
"""Where the averages start; they lose half their weight in 14 steps."""
_LEAST_WORTH = 1e-4
"""Keeps the window's scores above 0, so that a budget may still admit it."""
_SEED = 2402
"""Of the window's first tokens, so that runs can be repeated."""


@register("jacobi")
class JacobiStrategy:
    """One tenant's n-gram pool and acceptance rates; each sequence has a window and a pool of its own besides.

    Args:
        window: W, the columns of the window, 1 to 64. A draft takes at most half its budget for the window, which is
            narrower where W columns do not fit.
        ngram: N, the length of the n-grams, 3 to 16.
        guesses: G, the greatest number of n-grams verified in a step, 1 to 64. W 10, N 5 and G 10 are published
            values; docs/decisions has what they gain.
        pool_keys: the greatest number of first tokens in a pool, 1 to 2^20.

    Attributes:
        pool: the n-grams of all windows and outputs, none of a prompt. Guesses come from it where a sequence's own pool
            has fewer than G: the first sequence is drafted for as in the paper, later ones with longer acceptance.

    Raises:
        ValueError: an option's value is not allowed.
    """

    top_k = 0

    def __init__(
        self,
        *,
        window: Annotated[int, Range(1, 64)] = 10,
        ngram: Annotated[int, Range(3, 16)] = 5,
        guesses: Annotated[int, Range(1, 64)] = 10,
        pool_keys: Annotated[int, Range(1, 1 << 20)] = 4096,
    ) -> None:
        given = {"window": window, "ngram": ngram, "guesses": guesses, "pool_keys": pool_keys}
        check(read_options(JacobiStrategy), given)
        self.window, self.ngram, self.guesses, self.pool_keys = window, ngram, guesses, pool_keys
        self.rates = GuessRates(ngram, guesses)
        self.pool = NgramPool(guesses, pool_keys)

    @property
    def nbytes(self) -> int:
        """Bytes of the pool, about."""
        return len(self.pool) * (sys.getsizeof((0,) * (self.ngram - 1)) + sys.getsizeof(1 << 20) * (self.ngram - 1))

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
            worth = min(most, len(accepted) - 1) / window_nodes
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
        self.pool = NgramPool(strategy.guesses, strategy.pool_keys)
        self._learned = strategy.pool if learns else self.pool

    def index_prompt(self, max_tokens: int) -> int:
        """See `PromptIndexer`: counts n-grams."""
        n, begin = self._strategy.ngram, self._indexed
        ngrams = max(self._prompt.shape[0] - n + 1, 0)
        self._indexed = min(begin + max_tokens, ngrams)
        self.pool.add_all(self._prompt[begin : self._indexed + n - 1].tolist(), n)
        return self._indexed - begin

    def propose(self, budget: int) -> DraftTree:
        self.index_prompt(self._prompt.shape[0])
        strategy, rates, window = self._strategy, self._rates, EMPTY_TREE
        columns = min(strategy.window, (budget // 2 + 1) // (strategy.ngram - 1))
        if columns != (self.window.columns if self.window else 0):
            self.window = Window(columns, strategy.ngram, self._random_tokens()) if columns else None
        if self.window is not None:
            tokens, parents, _ = joined(self.window.paths())
            scores = np.full(tokens.shape[0], rates.worth, np.float32)
            window = merged([DraftTree(tokens, parents, scores)], budget)
        self._window_nodes = len(window)
        own, others = (pool.after(self._last)[::-1] for pool in (self.pool, strategy.pool))
        self._guesses = [*own, *(guess for guess in others if guess not in own)][: strategy.guesses]
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
        self._learned.add_all(self._output, self._strategy.ngram)
        self._output = self._output[1 - self._strategy.ngram :]
        self._last = written[-1]
        self._guesses, self._window_nodes = [], 0

    def close(self) -> None:
        """The tenant's pool keeps the n-grams."""

    def _random_tokens(self) -> Iterator[int]:
        """Tokens of the prompt, drawn for each window."""
        random = np.random.default_rng(_SEED)
        while True:
            yield from self._prompt[random.integers(0, self._prompt.shape[0], 64)].tolist()
