"""What a runner that chooses tokens itself must know of the sequences of a step. Plain arrays, without torch."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from strategies.draft import Float32Array, Int32Array

ON_HOST, MOST_PROBABLE, BY_SCORES = range(3)
"""Who chooses for a batch row: the host; the runner, the most probable token; the runner, by `ScoreRules`."""
SEEN, ENDS_OUTPUT = 1, 2
"""Flags of a token: it occurs in the prompt or the output; it ends the output."""


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


class Choices(NamedTuple):
    """Who chooses the next tokens of each batch row, and how.

    Attributes:
        kinds: int32[S]: `ON_HOST`, `MOST_PROBABLE` or `BY_SCORES`.
        rules: for each batch row of the last kind, in their order.
    """

    kinds: Int32Array
    rules: SequenceOf[ScoreRules]

    @classmethod
    def of(cls, rows: SequenceOf[ScoreRules | int]) -> Choices:
        """For each batch row its rules, or another kind."""
        kinds = [row if isinstance(row, int) else BY_SCORES for row in rows]
        return cls(np.array(kinds, np.int32), [row for row in rows if isinstance(row, ScoreRules)])


class RuleArrays(NamedTuple):
    """The rules of n sequences, side by side.

    Attributes:
        temperatures, top_ps, min_ps: float32[n].
        penalties: float32[n, 3]: repetition, presence, frequency.
        top_ks, unlocked_at: int32[n].
        seeds: int64[n], the bits of unsigned numbers.
        begins: int32[n + 1]; the tokens of sequence i are `begins[i]` to `begins[i + 1]`.
        tokens, counts, flags: int32[m]; biases: float32[m].
    """

    temperatures: Float32Array
    top_ps: Float32Array
    min_ps: Float32Array
    penalties: Float32Array
    top_ks: Int32Array
    unlocked_at: Int32Array
    seeds: npt.NDArray[np.int64]
    begins: Int32Array
    tokens: Int32Array
    counts: Int32Array
    flags: Int32Array
    biases: Float32Array

    @classmethod
    def of(cls, rules: SequenceOf[ScoreRules]) -> RuleArrays:
        return cls(
            temperatures=np.array([rule.temperature for rule in rules], np.float32),
            top_ps=np.array([rule.top_p for rule in rules], np.float32),
            min_ps=np.array([rule.min_p for rule in rules], np.float32),
            penalties=np.array([(rule.repetition, rule.presence, rule.frequency) for rule in rules], np.float32),
            top_ks=np.array([rule.top_k for rule in rules], np.int32),
            unlocked_at=np.array([rule.unlocked_at for rule in rules], np.int32),
            seeds=np.array([rule.seed for rule in rules], np.uint64).view(np.int64),
            begins=np.cumsum([0, *(rule.tokens.size for rule in rules)]).astype(np.int32),
            tokens=np.concatenate([rule.tokens for rule in rules]),
            counts=np.concatenate([rule.counts for rule in rules]),
            flags=np.concatenate([rule.flags for rule in rules]),
            biases=np.concatenate([rule.biases for rule in rules]),
        )
