"""Chooses the tokens of one sequence on the host; the specification is in `sampling.metadata`.

Constraints of the model are applied as transformers' `generate` does and in its order.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import Any

import numpy as np

from draftwood_model_runner.output import TokenLogprobs
from draftwood_model_runner.request import SamplingParams
from draftwood_model_runner.sampling.draws import draw_token, sampling_margin
from draftwood_model_runner.sampling.generation_defaults import NO_CONSTRAINTS, Constraints
from draftwood_model_runner.sampling.metadata import (
    ENDS_OUTPUT,
    MOST_PROBABLE,
    ON_HOST,
    SEEN,
    Adjustments,
    SequenceSampling,
)
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies.arrays import Float32Array, Int32Array
from draftwood_strategies.native import compiled

Logits = Any
"""What a runner predicts after one token: [vocab], an array of NumPy or a tensor of torch on any device."""


class ConstrainedLogits:
    """The constraints of one answer; remembers its tokens.

    Args:
        prompt: int32[p].
        max_tokens: new tokens at most.
        eos_token_ids: the model's end-of-sequence tokens.
    """

    def __init__(self, of: Constraints, prompt: Int32Array, max_tokens: int, eos_token_ids: frozenset[int]) -> None:
        self._of = of
        self._begin, self._last = prompt.size, prompt.size + max_tokens - 1
        self._bad_words = [words for words in of.bad_words if len(words) > 1 or words[0] not in eos_token_ids]
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], list[int]] = {}
        """The tokens that came after each run of one token less than `no_repeat_ngram_size`."""
        for token in prompt.tolist():
            self.accept(token)

    def process(self, scores: Float32Array) -> None:
        """Sets the scores, float32[vocab], of tokens that may not be written next to -inf."""
        of, tokens = self._of, self._tokens
        if of.no_repeat_ngram_size:
            scores[self._after.get(self._tail(of.no_repeat_ngram_size - 1), [])] = -np.inf
        for words in self._bad_words:
            if self._tail(len(words) - 1) == words[:-1]:
                scores[words[-1]] = -np.inf
        if of.forced_last and len(tokens) == self._last:
            scores[:] = -np.inf
            scores[list(of.forced_last)] = 0.0
        scores[list(of.suppressed)] = -np.inf
        if len(tokens) == self._begin:
            scores[list(of.suppressed_first)] = -np.inf

    def accept(self, token: int) -> None:
        """The next token of the answer."""
        if size := self._of.no_repeat_ngram_size:
            before = self._tail(size - 1)
            if len(before) == size - 1:
                self._after.setdefault(before, []).append(token)
        self._tokens.append(token)

    def _tail(self, count: int) -> tuple[int, ...]:
        """The last tokens, so many or all."""
        return tuple(self._tokens[max(0, len(self._tokens) - count) :])


def forbid(packed: bytes, scores: Float32Array) -> None:
    """Sets the scores, float32[vocab], of tokens that are not allowed to -inf.

    Args:
        packed: bit b of byte n is of token 8 n + b, from the lowest bit on, 1 if it is allowed; ceil(vocab / 32) * 4
            bytes or more.
    """
    _forbid(np.frombuffer(packed, np.int32, -(-scores.shape[0] // 32)), scores)


@compiled
def _forbid(words: Int32Array, scores: Float32Array) -> None:
    whole = scores.shape[0] // 32
    for at in range(whole):
        word = words[at]
        if word != -1:
            for bit in range(32):  # of fixed length and without a branch: many at a time
                score = scores[32 * at + bit]
                scores[32 * at + bit] = score if word >> bit & 1 else np.float32(-np.inf)
    for token in range(32 * whole, scores.shape[0]):
        if not words[whole] >> (token - 32 * whole) & 1:
            scores[token] = np.float32(-np.inf)


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


class TokenSampler:
    """Chooses the tokens of one sequence, one after the other, and keeps count of what was accepted.

    Args:
        sequence: the sequence to write; its output is empty.
        eos_token_ids: the model's end-of-sequence tokens.
        vocab_size: columns of the logits.
        constraints: of the model.

    Attributes:
        num_logprobs: alternatives that the request wants with the log-probability of each token; None for none.
        ended: the output ends with the token that was accepted last.
        complete: it ends since its grammar allows nothing more, of a model that has no token for an end.
    """

    def __init__(
        self,
        sequence: Sequence,
        eos_token_ids: frozenset[int],
        vocab_size: int,
        constraints: Constraints = NO_CONSTRAINTS,
    ) -> None:
        request = sequence.request
        params, stop = request.sampling, request.stop
        self.grammar = sequence.grammar
        self.num_logprobs = params.logprobs
        self.ended = self.complete = False
        self._has_end = bool(eos_token_ids)
        self._params = params
        self._position = int(request.prompt.size)
        self._unlocked_at = self._position + stop.min_tokens
        self._ends = stop.token_ids if stop.ignore_eos else stop.token_ids | eos_token_ids
        self._adjustments = LogitAdjustments(params, request.prompt, sorted(self._ends))
        self._constrained = None
        if constraints and self.grammar is None:  # a format alone determines what may be written
            self._constrained = ConstrainedLogits(constraints, request.prompt, stop.max_tokens, eos_token_ids)
        self._in_order = (
            params.temperature == 0.0 and not self._adjustments.changes(False) and self._constrained is None
        )
        """The next token is the most probable one that may be written."""
        self._plain = self._in_order and self.grammar is None

    @property
    def follows_predictions(self) -> bool:
        """The most probable token is the next one, now and for the rest of the output. Nothing needs to be chosen."""
        return self._plain and not self._locked

    @property
    def follows_device(self) -> bool:
        """A device needs nothing of what was accepted before to choose the next token, but its position."""
        return (
            self.grammar is None
            and self._constrained is None
            and not self._adjustments.penalizes
            and self.num_logprobs is None
        )

    @property
    def exact_top_k(self) -> int | None:
        """How many of the greatest logits decide the next token; None for all of them."""
        unchanged = self._constrained is None and self.grammar is None and not self._adjustments.changes(self._locked)
        if not unchanged or self._locked or self.num_logprobs is not None:
            return None
        return 1 if self._params.temperature == 0.0 else self._params.top_k or None

    @property
    def slow(self) -> bool:
        """The next mask of the grammar may take long, so that no step shall wait for it."""
        return self.grammar is not None and self.grammar.slow

    def sampling(self, nodes: Int32Array, parents: Int32Array) -> SequenceSampling | int:
        """How a device chooses the tokens of a step; `MOST_PROBABLE`, or `ON_HOST` if only this can.

        Args:
            nodes, parents: int32[n], tokens and parents of the draft tree with its root, which is node 0.
        """
        if self._constrained is not None or (self.grammar is not None and self._masks_on_host):
            return ON_HOST
        if self.follows_predictions:
            return MOST_PROBABLE
        masks = None if self.grammar is None else partial(self.grammar.masks, nodes, parents)
        return SequenceSampling(self._params, self._unlocked_at, self._adjustments.with_draft(nodes[1:]), masks)

    @property
    def _masks_on_host(self) -> bool:
        """A mask may take long; or none is needed, as one of the most probable tokens is usually allowed."""
        assert self.grammar is not None
        return self._in_order or self.grammar.slow or self.grammar.pending is not None

    def sample_and_accept(self, logits: Logits, most_probable: SequenceOf[int]) -> int:
        """The next token, which is accepted.

        Args:
            logits: [vocab], the model's own after everything accepted so far.
            most_probable: the tokens of the largest of them, in order; one or more.
        """
        token = self.sample(logits, most_probable)
        self.accept(token)
        return token

    def sample(self, logits: Logits, most_probable: SequenceOf[int]) -> int:
        """As `sample_and_accept`, but the token is not accepted."""
        if self._in_order:
            forbidden = self._ends if self._locked else ()
            for token in most_probable:
                if token not in forbidden and (self.grammar is None or self.grammar.allows(token)):
                    return token
        scores = self._adjusted(logits)
        if self._params.temperature == 0.0:
            return int(scores.argmax())
        return draw_token(scores, self._params, self._position)

    def margin(self, logits: Logits, token: int) -> float:
        """By how much logits [vocab] would have to be off for `token` to be picked, over the largest of them.

        It is the difference to the token that is picked, or the distance to the edge of what top-k, top-p and min-p
        keep. Infinite for a token that the request, the model's constraints or the grammar forbid.
        """
        largest = float(np.abs(_on_host(logits)).max())
        scores = self._adjusted(logits)
        if self._params.temperature == 0.0:
            margin = float(scores.max()) - float(scores[token])
        else:
            margin = sampling_margin(scores, self._params, self._position, token)
        return margin / max(largest, 1e-30)

    def logprobs(self, logits: Logits, token: int) -> TokenLogprobs:
        """Log-probabilities by the model's own logits [vocab], before any processing."""
        scores, count = _on_host(logits), self.num_logprobs or 0
        scores = scores - scores.max()
        scores -= np.float32(np.log(np.exp(scores).sum(dtype=np.float64)))
        top = np.argpartition(-scores, count)[:count] if count < scores.size else np.arange(scores.size)
        top = top[np.argsort(-scores[top], kind="stable")]
        return TokenLogprobs(float(scores[token]), top.tolist(), scores[top].tolist())

    def accept(self, token: int) -> None:
        """`token` is the next one of the output."""
        self.ended = token in self._ends and not self._locked
        self._position += 1
        self._adjustments.count(token)
        if self._constrained is not None:
            self._constrained.accept(token)
        if self.grammar is not None:
            self.grammar.accept(token)
            if not self._has_end and self.grammar.complete:
                self.ended = self.complete = True

    @property
    def _locked(self) -> bool:
        """The output may not end yet."""
        return self._position < self._unlocked_at and bool(self._ends)

    def _adjusted(self, logits: Logits) -> Float32Array:
        """float32[vocab]: after penalties and bias, -inf for what may not be written; not to be written to."""
        changes = self._adjustments.changes(self._locked)
        copies = changes or self._constrained is not None or self.grammar is not None
        scores = _on_host(logits).copy() if copies else _on_host(logits)
        if changes:
            self._adjustments.apply(scores, self._locked)
        if self._constrained is not None:
            self._constrained.process(scores)
        if self.grammar is not None:
            self.grammar.mask(scores)
        return scores


def exact_top_k(samplers: SequenceOf[TokenSampler | None]) -> int | None:
    """How many of the greatest logits of each row decide the tokens of a step; None for all of them."""
    count = 1
    for sampler in samplers:
        needed = 1 if sampler is None else sampler.exact_top_k
        if needed is None:
            return None
        count = max(count, needed)
    return count


def _on_host(logits: Logits) -> Float32Array:
    """float32[vocab], contiguous; not to be written to."""
    array = logits if isinstance(logits, np.ndarray) else logits.detach().float().cpu().numpy()
    return np.ascontiguousarray(array, np.float32)
