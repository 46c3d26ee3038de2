"""Sampling metadata: how the next tokens of a step's batch rows are chosen. Plain arrays, without torch.

The specification, which every device implements. At each node of a draft tree, the model's logits [vocab] after the
prefix of this node become the token at absolute position t in these steps, in float32 and in transformers' order:

1. Tokens of the prompt and of the output so far, the draft down to this node included: the repetition penalty divides
   what is positive and multiplies what is negative. For tokens of the output, the presence penalty is subtracted, and
   the frequency penalty times their count. Then the logit bias is added.
2. -inf for tokens that would end the output before min_tokens, for what the generation config of the model forbids
   (`Constraints`), and for what the grammar of the output does not allow next.
3. At temperature 0, the greatest; of equal ones that with the lowest id. Otherwise the scores are divided by the
   temperature, top-k, top-p and min-p drop tokens (`selection.token_weights`), and of those that are left the greatest
   sum of score and Gumbel noise is taken: a sample from the softmax (the Gumbel-max trick). The noise depends on (seed,
   t) and the token alone (`draws.gumbel_noise`), so a seed writes the same text with and without drafts, and in any
   batch.

Verification follows the tree from its root along these tokens (`AcceptedPath`). On the host, `TokenSampler` and
`verification.verify`; on a GPU, `runners.cuda.sampling`. Tests compare them with each other, and with transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from draftwood_model_runner.request import SamplingParams
from draftwood_model_runner.sampling.selection import dropped_share, least_weight
from draftwood_strategies.arrays import Float32Array, Int32Array
from draftwood_strategies.threads import in_threads, parts, usable_cpus

ON_HOST, MOST_PROBABLE, SAMPLED = range(3)
"""How a device chooses for a batch row: it does not; the most probable token; by `SequenceSampling`."""
SEEN, ENDS_OUTPUT = 1, 2
"""Flags of a token: it occurs in the prompt or the output; it ends the output."""
NOT_SAMPLED = -1
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


class Adjustments(NamedTuple):
    """The tokens of one sequence whose logits are not left as they are, besides masks.

    Attributes:
        tokens: int32[m], each once. With penalties, all that the sequence has written and all of its draft.
        counts: int32[m], how often each occurs in the output.
        biases: float32[m].
        flags: int32[m], `SEEN` and `ENDS_OUTPUT`.
    """

    tokens: Int32Array
    counts: Int32Array
    biases: Float32Array
    flags: Int32Array


class SequenceSampling(NamedTuple):
    """How the next tokens of one sequence are chosen.

    Attributes:
        params: temperature, top-k, top-p, min-p, seed and penalties.
        unlocked_at: the first absolute position where tokens with the flag `ENDS_OUTPUT` may be written.
        masks: for the draft tree of the step, or what finds them, to be called while the device computes; None if
            every token may follow.
    """

    params: SamplingParams
    unlocked_at: int
    adjustments: Adjustments
    masks: TokenMasks | Callable[[], TokenMasks] | None = None


class SamplingMetadata(NamedTuple):
    """How the next tokens of each batch row are chosen; can be sent to other processes once all masks are found.

    Attributes:
        kinds: int32[S]: `ON_HOST`, `MOST_PROBABLE` or `SAMPLED`.
        sequences: for each batch row of the last kind, in their order.
        logprobs: int32[S]: how many alternatives are reported with the log-probability of each token, -1 for none.
    """

    kinds: Int32Array
    sequences: SequenceOf[SequenceSampling]
    logprobs: Int32Array

    @classmethod
    def of(cls, rows: SequenceOf[SequenceSampling | int], logprobs: SequenceOf[int | None] = ()) -> SamplingMetadata:
        """For each batch row its sampling, or another kind, and how many log-probabilities it reports, if any."""
        kinds = [row if isinstance(row, int) else SAMPLED for row in rows]
        counts = [-1 if count is None else count for count in logprobs or [None] * len(rows)]
        sequences = [row for row in rows if isinstance(row, SequenceSampling)]
        return cls(np.array(kinds, np.int32), sequences, np.array(counts, np.int32))

    def with_masks(self) -> SamplingMetadata:
        """The same with all masks found, for other processes."""
        masked = zip(self.sequences, _all_masks(self.sequences), strict=True)
        return self._replace(sequences=[sequence._replace(masks=masks) for sequence, masks in masked])


class SamplingTensors(NamedTuple):
    """The sampling of n sequences side by side, and the R rows of logits between the first and the last of theirs.

    Attributes:
        row_sequences: int32[R], the sequence of each row; -1 for a row of another kind between them.
        row_masks: int32[R], its row of `masks`, `NO_MASK` or `UNKNOWN_MASK`.
        temperatures, least_weights: float32[n]; dropped_shares: float64[n], negative without top-p; see
            `token_weights`.
        penalties: float32[n, 3]: repetition, presence, frequency.
        top_ks, unlocked_at: int32[n].
        seeds: int64[n], the bits of unsigned numbers.
        offsets: int32[n + 1]; the adjusted tokens of sequence i are `offsets[i]` to `offsets[i + 1]`.
        tokens, counts, flags: int32[m]; biases: float32[m]; as in `Adjustments`.
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
    offsets: Int32Array
    tokens: Int32Array
    counts: Int32Array
    flags: Int32Array
    biases: Float32Array
    masks: Int32Array

    @classmethod
    def of(
        cls, sequences: SequenceOf[SequenceSampling], first_rows: Int32Array, last_rows: Int32Array
    ) -> SamplingTensors:
        """Finds masks that are yet to be found.

        Args:
            sequences: one or more.
            first_rows, last_rows: int32[n], where the rows of logits of each sequence begin and end.
        """
        row_sequences, row_masks = np.full((2, int(last_rows[-1] - first_rows[0])), -1, np.int32)
        masks, count = [np.zeros((0, 1), np.int32)], 0
        for i, (of_nodes, begin, end) in enumerate(zip(_all_masks(sequences), first_rows, last_rows, strict=True)):
            rows = slice(begin - first_rows[0], end - first_rows[0])
            row_sequences[rows], row_masks[rows] = i, NO_MASK
            if of_nodes is not None:
                row_masks[rows] = np.where(of_nodes.rows >= 0, of_nodes.rows + count, of_nodes.rows)
                masks.append(of_nodes.bits)
                count += of_nodes.bits.shape[0]
        tokens, counts, biases, flags = zip(*(sequence.adjustments for sequence in sequences), strict=True)
        params = [sequence.params for sequence in sequences]
        penalties = [(each.repetition_penalty, each.presence_penalty, each.frequency_penalty) for each in params]
        return cls(
            row_sequences=row_sequences,
            row_masks=row_masks,
            temperatures=np.array([each.temperature for each in params], np.float32),
            dropped_shares=np.array([dropped_share(each.top_p) for each in params]),
            least_weights=np.array([least_weight(each.min_p) for each in params], np.float32),
            penalties=np.array(penalties, np.float32),
            top_ks=np.array([each.top_k for each in params], np.int32),
            unlocked_at=np.array([sequence.unlocked_at for sequence in sequences], np.int32),
            seeds=np.array([each.seed for each in params], np.uint64).view(np.int64),
            offsets=np.cumsum([0, *(part.size for part in tokens)]).astype(np.int32),
            tokens=np.concatenate(tokens),
            counts=np.concatenate(counts),
            flags=np.concatenate(flags),
            biases=np.concatenate(biases),
            masks=np.concatenate(masks[1:] or masks),
        )


def _all_masks(sequences: SequenceOf[SequenceSampling]) -> list[TokenMasks | None]:
    """The masks of each, those that are yet to be found by several threads."""

    def find(group: SequenceOf[SequenceSampling]) -> list[TokenMasks | None]:
        return [sequence.masks() if callable(sequence.masks) else sequence.masks for sequence in group]

    if not any(callable(sequence.masks) for sequence in sequences):
        return find(sequences)
    threads = usable_cpus()
    groups = [sequences[part.start : part.stop] for part in parts(len(sequences), threads)]
    return [*chain.from_iterable(in_threads([partial(find, group) for group in groups], threads))]
