"""What a runner that chooses tokens itself must know of the sequences of a step. Plain arrays, without torch."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from draftwood_model_runner.runners.host.cpus import usable_cpus
from draftwood_model_runner.runners.host.row_threads import in_threads, parts
from draftwood_model_runner.runners.token_weights import dropped_share, least_weight
from draftwood_strategies.draft import Float32Array, Int32Array

ON_HOST, MOST_PROBABLE, BY_SCORES = range(3)
"""Who chooses for a batch row: the host; the runner, the most probable token; the runner, by `ScoreRules`."""
SEEN, ENDS_OUTPUT = 1, 2
"""Flags of a token: it occurs in the prompt or the output; it ends the output."""
NOT_CHOSEN = -1
"""In place of a token, where the host must choose."""
NO_MASK, UNKNOWN_MASK = -1, -2
"""In place of the row of a mask: every token may follow; the host must find out which may."""


class TokenMasks(NamedTuple):
    """Which tokens may follow the nodes of a draft tree.

    Attributes:
        rows: int32[n], for each node, the root first, its row of `bits`, or `UNKNOWN_MASK`.
        bits: int32[m, ceil(vocab / 32)]; bit b of word w is of token 32 w + b, from the lowest bit on.
    """

    rows: Int32Array
    bits: Int32Array


class ScoreRules(NamedTuple):
    """How the next tokens of one sequence are chosen from logits; see `sampling.TokenChooser` for the order.

    Attributes:
        repetition, presence, frequency: penalties.
        unlocked_at: the first absolute position where tokens with the flag `ENDS_OUTPUT` may be written.
        tokens: int32[m], those whose logits are not left as they are, each once. With penalties, all that the sequence
            has written and all of its draft.
        counts: int32[m], how often each occurs in the output.
        biases: float32[m].
        flags: int32[m], `SEEN` and `ENDS_OUTPUT`.
        masks: for the draft tree of the step, or what finds them, to be called while the device computes; None if
            every token may follow.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition: float
    presence: float
    frequency: float
    unlocked_at: int
    tokens: Int32Array
    counts: Int32Array
    biases: Float32Array
    flags: Int32Array
    masks: TokenMasks | Callable[[], TokenMasks] | None = None


class Choices(NamedTuple):
    """Who chooses the next tokens of each batch row, and how.

    Attributes:
        kinds: int32[S]: `ON_HOST`, `MOST_PROBABLE` or `BY_SCORES`.
        rules: for each batch row of the last kind, in their order.
        logprobs: int32[S]: how many alternatives are reported with the log-probability of each token, -1 for none.
    """

    kinds: Int32Array
    rules: SequenceOf[ScoreRules]
    logprobs: Int32Array

    @classmethod
    def of(cls, rows: SequenceOf[ScoreRules | int], logprobs: SequenceOf[int | None] = ()) -> Choices:
        """For each batch row its rules, or another kind, and how many log-probabilities it reports, if any."""
        kinds = [row if isinstance(row, int) else BY_SCORES for row in rows]
        counts = [-1 if count is None else count for count in logprobs or [None] * len(rows)]
        rules = [row for row in rows if isinstance(row, ScoreRules)]
        return cls(np.array(kinds, np.int32), rules, np.array(counts, np.int32))

    def with_masks(self) -> Choices:
        """The same with all masks found, for other processes."""
        found = zip(self.rules, _found(self.rules), strict=True)
        return self._replace(rules=[rule._replace(masks=masks) for rule, masks in found])


class RuleArrays(NamedTuple):
    """The rules of n sequences, side by side, and the R rows of logits between the first and the last of theirs.

    Attributes:
        row_sequences: int32[R], the sequence of each row; -1 for a row of another kind between them.
        row_masks: int32[R], its row of `masks`, `NO_MASK` or `UNKNOWN_MASK`.
        temperatures, least_weights: float32[n]; dropped_shares: float64[n], negative without top-p; see
            `token_weights`.
        penalties: float32[n, 3]: repetition, presence, frequency.
        top_ks, unlocked_at: int32[n].
        seeds: int64[n], the bits of unsigned numbers.
        begins: int32[n + 1]; the tokens of sequence i are `begins[i]` to `begins[i + 1]`.
        tokens, counts, flags: int32[m]; biases: float32[m].
        masks: int32[k, words], of all sequences.
    """

    row_sequences: Int32Array
    row_masks: Int32Array
    temperatures: Float32Array
    dropped_shares: npt.NDArray[np.float64]
    least_weights: Float32Array
    penalties: Float32Array
    top_ks: Int32Array
    unlocked_at: Int32Array
    seeds: npt.NDArray[np.int64]
    begins: Int32Array
    tokens: Int32Array
    counts: Int32Array
    flags: Int32Array
    biases: Float32Array
    masks: Int32Array

    @classmethod
    def of(cls, rules: SequenceOf[ScoreRules], first_rows: Int32Array, last_rows: Int32Array) -> RuleArrays:
        """Finds masks that are yet to be found.

        Args:
            rules: one or more.
            first_rows, last_rows: int32[n], where the rows of logits of each sequence begin and end.
        """
        row_sequences, row_masks = np.full((2, int(last_rows[-1] - first_rows[0])), -1, np.int32)
        masks, count = [np.zeros((0, 1), np.int32)], 0
        for i, (found, begin, end) in enumerate(zip(_found(rules), first_rows, last_rows, strict=True)):
            rows = slice(begin - first_rows[0], end - first_rows[0])
            row_sequences[rows], row_masks[rows] = i, NO_MASK
            if found is not None:
                row_masks[rows] = np.where(found.rows >= 0, found.rows + count, found.rows)
                masks.append(found.bits)
                count += found.bits.shape[0]
        return cls(
            row_sequences=row_sequences,
            row_masks=row_masks,
            temperatures=np.array([rule.temperature for rule in rules], np.float32),
            dropped_shares=np.array([dropped_share(rule.top_p) if rule.top_p < 1.0 else -1.0 for rule in rules]),
            least_weights=np.array([least_weight(rule.min_p) for rule in rules], np.float32),
            penalties=np.array([(rule.repetition, rule.presence, rule.frequency) for rule in rules], np.float32),
            top_ks=np.array([rule.top_k for rule in rules], np.int32),
            unlocked_at=np.array([rule.unlocked_at for rule in rules], np.int32),
            seeds=np.array([rule.seed for rule in rules], np.uint64).view(np.int64),
            begins=np.cumsum([0, *(rule.tokens.size for rule in rules)]).astype(np.int32),
            tokens=np.concatenate([rule.tokens for rule in rules]),
            counts=np.concatenate([rule.counts for rule in rules]),
            flags=np.concatenate([rule.flags for rule in rules]),
            biases=np.concatenate([rule.biases for rule in rules]),
            masks=np.concatenate(masks[1:] or masks),
        )


def _found(rules: SequenceOf[ScoreRules]) -> list[TokenMasks | None]:
    """The masks of each, those that are yet to be found by several threads."""
    threads = usable_cpus()
    groups = [rules[part.start : part.stop] for part in parts(len(rules), threads)]

    def find(group: SequenceOf[ScoreRules]) -> list[TokenMasks | None]:
        return [rule.masks() if callable(rule.masks) else rule.masks for rule in group]

    if not any(callable(rule.masks) for rule in rules):
        return find(rules)
    return [*chain.from_iterable(in_threads([partial(find, group) for group in groups], threads))]
