"""Penalties, logit bias and tokens that must not end the output yet: what they do to logits on the host. No torch."""

from __future__ import annotations

import numpy as np

from draftwood_model_runner.request import SamplingParams
from draftwood_model_runner.sampling.metadata import ENDS_OUTPUT, SEEN, Adjustments
from draftwood_strategies.draft import Float32Array, Int32Array


class LogitAdjustments:
    """The adjusted tokens of one sequence; counts what it writes.

    Args:
        params: its penalties and logit bias.
        prompt: int32[p].
        ends: the tokens that end the output.
    """

    def __init__(self, params: SamplingParams, prompt: Int32Array, ends: list[int]) -> None:
        self._repetition = np.float32(params.repetition_penalty)
        self._presence, self._frequency = np.float32(params.presence_penalty), np.float32(params.frequency_penalty)
        self.penalizes = params.repetition_penalty != 1.0 or bool(params.presence_penalty or params.frequency_penalty)
        self._has_bias = bool(params.logit_bias)
        seen = prompt if params.repetition_penalty != 1.0 else np.zeros(0, np.int32)
        biased = np.array([token for token, _ in params.logit_bias], np.int32)
        tokens = np.unique(np.concatenate([seen, biased, np.array(ends, np.int32)])).astype(np.int32)
        counts, flags = np.zeros((2, tokens.size), np.int32)
        biases = np.zeros(tokens.size, np.float32)
        flags[np.searchsorted(tokens, seen)] |= SEEN
        flags[np.searchsorted(tokens, ends)] |= ENDS_OUTPUT
        for token, bias in params.logit_bias:
            biases[np.searchsorted(tokens, token)] += np.float32(bias)
        self._all = Adjustments(tokens, counts, biases, flags)
        self._entries = {token: entry for entry, token in enumerate(tokens.tolist())} if self.penalizes else {}

    def changes(self, locked: bool) -> bool:
        """Whether the next logits are changed; `locked`: the output may not end yet."""
        return self.penalizes or self._has_bias or locked

    def count(self, token: int) -> None:
        """The output goes on with this token."""
        if not self.penalizes:
            return
        if token not in self._entries:
            self._all = self.with_draft(np.array([token], np.int32))
            self._entries[token] = self._all.tokens.size - 1
        entry = self._entries[token]
        self._all.counts[entry] += 1
        self._all.flags[entry] |= SEEN

    def with_draft(self, draft: Int32Array) -> Adjustments:
        """With penalties, these tokens are among the adjusted ones as well."""
        if not self.penalizes:
            return self._all
        new = np.array([token for token in dict.fromkeys(draft.tolist()) if token not in self._entries], np.int32)
        zeros, tokens, counts, biases, flags = np.zeros_like(new), *self._all
        return Adjustments(
            np.concatenate([tokens, new]),
            np.concatenate([counts, zeros]),
            np.concatenate([biases, zeros.astype(np.float32)]),
            np.concatenate([flags, zeros]),
        )

    def apply(self, scores: Float32Array, locked: bool) -> None:
        """Changes scores, float32[vocab], in place."""
        tokens, counts, biases, flags = self._all
        values = scores[tokens]
        penalized = np.where(values < 0, values * self._repetition, values / self._repetition)
        values = np.where(flags & SEEN, penalized, values)
        values -= np.where(counts > 0, self._presence, np.float32(0.0)) + self._frequency * counts.astype(np.float32)
        values += biases
        if locked:
            values[(flags & ENDS_OUTPUT) > 0] = -np.inf
        scores[tokens] = values
