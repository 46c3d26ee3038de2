"""Chooses the next token: logits processed as the request asks, and noise that depends on seed and position alone.

The target token at absolute position t is argmax(processed logits + Gumbel noise keyed by (seed, t)), which is a sample
from the softmax of the processed logits (the Gumbel-max trick). As the noise depends on nothing else, a seed writes the
same text with and without drafts, and in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from draftwood_model_runner.output import TokenLogprobs
from draftwood_model_runner.runners.choices import ENDS_OUTPUT, MOST_PROBABLE, ON_HOST, SEEN, ScoreRules
from draftwood_model_runner.sampling.constraints import ConstrainedLogits
from draftwood_model_runner.sampling.draws.noise import gumbel_noise
from draftwood_model_runner.sampling.draws.sample import Draw, kept_tokens, sample
from draftwood_model_runner.sampling.generation_defaults import NO_CONSTRAINTS, Constraints
from draftwood_model_runner.sampling.margins import sampling_margin
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies.draft import Int32Array

Logits = torch.Tensor | npt.NDArray[np.float32]
"""What a runner predicts after one token: [vocab]."""


class TokenChooser:
    """Chooses the tokens of one sequence, one after the other; remembers what it chose.

    Logits are processed in the order of transformers' `generate`: repetition penalty, then presence and frequency
    penalties and logit bias, tokens that min_tokens, the model's constraints or a grammar forbid, temperature, top-k,
    top-p, min-p.

    Args:
        sequence: the sequence to write; its output is empty.
        eos_token_ids: the model's end-of-sequence tokens.
        vocab_size: columns of the logits.
        constraints: of the model.
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
        self._params = params
        self._position = int(request.prompt.size)
        self._unlocked_at = self._position + stop.min_tokens
        self._ends = sorted(stop.token_ids if stop.ignore_eos else stop.token_ids | eos_token_ids)
        self._draw = Draw(params.temperature, params.top_k, params.top_p, params.min_p)
        self._seen: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        if params.repetition_penalty != 1.0:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool)
            self._seen[torch.from_numpy(request.prompt.astype(np.int64))] = True
        if params.presence_penalty or params.frequency_penalty:
            self._counts = torch.zeros(vocab_size)
        self._constrained = None
        if constraints and self.grammar is None:  # a format alone determines what may be written
            self._constrained = ConstrainedLogits(constraints, request.prompt, stop.max_tokens, eos_token_ids)
        self._in_order = (
            params.temperature == 0.0
            and self._seen is None
            and self._counts is None
            and not params.logit_bias
            and self._constrained is None
        )
        """The next token is the most probable one that may be written."""
        self._plain = self._in_order and self.grammar is None

    @property
    def follows_predictions(self) -> bool:
        """The most probable token is the next one, now and for the rest of the output. Nothing needs to be chosen."""
        return self._plain and (self._position >= self._unlocked_at or not self._ends)

    def rules(self, nodes: Int32Array, parents: Int32Array) -> ScoreRules | int:
        """How a runner chooses the tokens of a step: `MOST_PROBABLE`, by rules, or `ON_HOST` if only this can.

        Args:
            nodes, parents: int32[n], tokens and parents of the draft tree with its root, which is node 0.
        """
        if self._constrained is not None or (self.grammar is not None and self._masks_on_host):
            return ON_HOST
        if self.follows_predictions:
            return MOST_PROBABLE
        params, draft = self._params, nodes[1:]
        penalized = [part.numpy() for part in (self._seen, self._counts) if part is not None]
        ends = self._ends if self._locked else []
        tokens = np.array([*(token for token, _ in params.logit_bias), *ends], np.int32)
        if penalized:
            tokens = np.concatenate([tokens, *map(np.flatnonzero, penalized), draft])
        tokens = np.unique(tokens).astype(np.int32)
        biases, flags, counts = np.zeros(tokens.size, np.float32), *np.zeros((2, tokens.size), np.int32)
        for token, bias in params.logit_bias:
            biases[np.searchsorted(tokens, token)] += bias
        flags[np.searchsorted(tokens, ends)] |= ENDS_OUTPUT
        if self._seen is not None:
            flags |= SEEN * self._seen.numpy()[tokens]
        if self._counts is not None:
            counts = self._counts.numpy()[tokens].astype(np.int32)
        return ScoreRules(
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            params.seed,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            self._unlocked_at,
            tokens,
            counts,
            biases,
            flags,
            None if self.grammar is None else partial(self.grammar.masks, nodes, parents),
        )

    @property
    def _masks_on_host(self) -> bool:
        """A mask may take long; or none is needed, as one of the most probable tokens is usually allowed."""
        assert self.grammar is not None
        return self._in_order or self.grammar.slow or self.grammar.pending is not None

    @property
    def slow(self) -> bool:
        """The next mask of the grammar may take long, so that no step shall wait for it."""
        return self.grammar is not None and self.grammar.slow

    def choose(self, logits: Logits, most_probable: SequenceOf[int]) -> int:
        """The next token, which is remembered.

        Args:
            logits: [vocab], the model's own after everything chosen so far.
            most_probable: the tokens of the largest of them, in order; one or more.
        """
        token = self.pick(logits, most_probable)
        self.remember(token)
        return token

    def pick(self, logits: Logits, most_probable: SequenceOf[int]) -> int:
        """As `choose`, without remembering it."""
        if self._in_order:
            forbidden = self._ends if self._locked else ()
            for token in most_probable:
                if token not in forbidden and (self.grammar is None or self.grammar.allows(token)):
                    return token
        return self._process(logits)

    @torch.inference_mode()
    def margin(self, logits: Logits, token: int) -> float:
        """By how much logits [vocab] would have to be off for `token` to be picked, over the largest of them.

        It is the difference to the token that is picked, or the distance to the edge of what top-k, top-p and min-p
        keep. Infinite for a token that the request, the model's constraints or the grammar forbid.
        """
        largest = float(torch.as_tensor(logits).float().abs().max())
        scores = self._constrain(logits).double()
        if self._params.temperature == 0.0:
            margin = float(scores.max() - scores[token])
        else:
            kept = kept_tokens(scores.float().numpy(), self._draw)
            cooled = scores.numpy() / self._params.temperature
            noise = gumbel_noise(cooled.size, self._params.seed, self._position)
            margin = sampling_margin(cooled, kept, noise, token) * self._params.temperature
        return margin / max(largest, 1e-30)

    @torch.inference_mode()
    def logprobs(self, logits: Logits, token: int) -> TokenLogprobs:
        """Log-probabilities by the model's own logits [vocab], before any processing."""
        scores = torch.log_softmax(torch.as_tensor(logits).float(), -1)
        count = self._params.logprobs or 0
        top = scores.topk(count)
        return TokenLogprobs(float(scores[token]), top.indices.tolist(), top.values.tolist())

    @torch.inference_mode()
    def _process(self, logits: Logits) -> int:
        scores = self._constrain(logits)
        if self._params.temperature == 0.0:
            return int(scores.argmax())
        return sample(scores.numpy(), self._draw, self._params.seed, self._position)

    @property
    def _locked(self) -> bool:
        """The output may not end yet."""
        return self._position < self._unlocked_at and bool(self._ends)

    @property
    def _changes_scores(self) -> bool:
        """The next token is not chosen from the model's own logits."""
        own = self._seen is None and self._counts is None and self._constrained is None and self.grammar is None
        return not own or bool(self._params.logit_bias) or self._locked

    def _constrain(self, logits: Logits) -> torch.Tensor:
        """float32[vocab]: after penalties and bias, -inf for what may not be written; not to be written to."""
        params = self._params
        scores = torch.as_tensor(logits).detach().to(device="cpu", dtype=torch.float32, copy=self._changes_scores)
        scores = scores.contiguous()
        if self._seen is not None:
            seen = self._seen.nonzero().squeeze(1)
            values, penalty = scores[seen], params.repetition_penalty
            scores[seen] = torch.where(values < 0, values * penalty, values / penalty)
        if self._counts is not None:
            written = self._counts.nonzero().squeeze(1)
            scores[written] -= params.presence_penalty + params.frequency_penalty * self._counts[written]
        for token, bias in params.logit_bias:
            scores[token] += bias
        if self._locked:
            scores[self._ends] = -torch.inf
        if self._constrained is not None:
            scores = self._constrained.process(scores)
        if self.grammar is not None:
            self.grammar.mask(scores)
        return scores

    def remember(self, token: int) -> None:
        """`token` is the next one of the output."""
        self._position += 1
        if self._seen is not None:
            self._seen[token] = True
        if self._counts is not None:
            self._counts[token] += 1.0
        if self._constrained is not None:
            self._constrained.accept(token)
        if self.grammar is not None:
            self.grammar.accept(token)
