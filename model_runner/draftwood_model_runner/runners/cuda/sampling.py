"""The tokens of a step: chosen on the device, with the paths of draft trees that they accept, and handed to the host.

The host chooses where the device cannot, as under a grammar whose mask is not known yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from draftwood_model_runner.output import TokenLogprobs
from draftwood_model_runner.runners.base import Predictions, Runner, StepBatch, compact
from draftwood_model_runner.runners.cuda.device import SAMPLING_BLOCK, SAMPLING_ENTRIES, launch, power_of_2, to_device
from draftwood_model_runner.runners.cuda.kernels.sampling import accept_paths, adjust_scores, sample_tokens
from draftwood_model_runner.runners.cuda.memory import KVPages, StepArrays
from draftwood_model_runner.runners.cuda.recurrent_layers import STATE_NODES
from draftwood_model_runner.runners.cuda.state_rows import RowState
from draftwood_model_runner.runners.machine import device_errors
from draftwood_model_runner.sampling.metadata import (
    MOST_PROBABLE,
    NOT_SAMPLED,
    ON_HOST,
    SAMPLED,
    SamplingMetadata,
    SamplingTensors,
    SequenceSampling,
)
from draftwood_model_runner.sampling.token_sampler import TokenSampler
from draftwood_model_runner.sampling.verification import AcceptedPath, predicted_paths, verify
from draftwood_strategies.arrays import Float32Array, Int32Array, segment_sizes
from draftwood_strategies.base import StepFeedback

TOP = 8
"""Most probable tokens that each step gives: what token recycling keeps of each row."""

_AS_ON_HOST = {"enable_fp_fusion": False}
"""Products and sums are rounded one by one."""


class Logprobs(NamedTuple):
    """Log-probabilities by the model's own logits; rows of sequences that report none have no meaning.

    Attributes:
        sampled: float32[R], of the token that is written.
        top_tokens: int32[R, k], the most probable tokens, best first.
        top: float32[R, k], theirs.
    """

    sampled: Float32Array
    top_tokens: Int32Array
    top: Float32Array

    def at(self, row: int, count: int) -> TokenLogprobs:
        """The log-probabilities of a row, with `count` of the most probable tokens."""
        return TokenLogprobs(
            float(self.sampled[row]), self.top_tokens[row, :count].tolist(), self.top[row, :count].tolist()
        )


class HostResults(NamedTuple):
    """What a step predicts and chooses, on the host.

    Attributes:
        predictions: the logits and features are on the device.
        sampled: int32[R], the token that is written after each, or `NOT_SAMPLED`; None if no sampling was given.
        logprobs: if a sequence reports them.
        laid_out: if the device laid the step out.
    """

    predictions: Predictions
    sampled: Int32Array | None
    logprobs: Logprobs | None
    laid_out: LaidOut | None

    def part(self, rows: npt.NDArray[np.int64]) -> HostResults:
        """Some of the rows of logits, whose logits are not asked for."""
        tokens, top_tokens = self.predictions.tokens, self.predictions.top_tokens
        assert top_tokens is not None
        assert self.sampled is not None
        predictions = Predictions(None, tokens[rows], top_tokens[rows])
        return HostResults(predictions, self.sampled[rows], None, None)


class Written(NamedTuple):
    """What the S batch rows of a step write, on the device; of rows that the host chooses for it has no meaning.

    Attributes:
        tokens: int32[S, n], of each row the tokens of the accepted nodes, and the one after them.
        counts: int32[S], accepted nodes.
        ends: int32[S], the position of the last token that is written.
        nodes, parents, top_tokens, offsets: of the verified trees, see `WrittenOnDevice`, which it is if all rows
            decode: until the next step is laid out in the same memory.
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    ends: torch.Tensor
    nodes: torch.Tensor
    parents: torch.Tensor
    top_tokens: torch.Tensor
    offsets: torch.Tensor


class LaidOut(NamedTuple):
    """A step of T tokens as the device laid it out, on the host.

    Attributes:
        tokens, parents: int32[T]; a parent is a token of the step, -1 for the root of a tree and for padding.
        scores: float32[d, n], of the nodes of d drafts.
        drafted: bool[S], the batch rows with these drafts, in their order.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor
    drafted: npt.NDArray[np.bool_]


class Results(NamedTuple):
    """What a step predicts and chooses. The host's parts are there once the device has come so far.

    Attributes:
        logits: [R, vocab], on the device.
        top: int32[R, TOP + 1], on the host: the most probable tokens, best first, and the chosen one.
        more: int32[R, k], more of the most probable tokens, if they were asked for.
        has_samples: tokens were chosen.
        logprobs: as `Logprobs`, on the host.
        written: if tokens were chosen; to be called before another step is laid out.
        features: see `StepInFlight.features`; a copy, on the device.
    """

    logits: torch.Tensor
    top: torch.Tensor
    more: Int32Array | None
    has_samples: bool
    logprobs: tuple[torch.Tensor, ...] | None
    written: Callable[[], Written] | None
    features: torch.Tensor | None = None

    def on_host(self, laid_out: LaidOut | None) -> HostResults:
        """Copies, as the next step writes to the same memory."""
        tokens = self.top.numpy().copy()
        top_tokens = tokens[:, :TOP].copy() if self.more is None else self.more
        return HostResults(
            Predictions(self.logits, tokens[:, 0].copy(), top_tokens, self.features),
            tokens[:, TOP].copy() if self.has_samples else None,
            None if self.logprobs is None else Logprobs(*(part.numpy() for part in self.logprobs)),
            laid_out,
        )


class Clock:
    """Tells when the device has come to the end of a step, and how long it took, without what was queued before."""

    def __init__(self, device: torch.device) -> None:
        self._began = time.perf_counter()
        self._events: Any = None
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._events[0].record()

    def stop(self) -> None:
        """The step ends here."""
        self._seconds = time.perf_counter() - self._began
        if self._events is not None:
            self._events[1].record()

    def wait(self) -> float:
        """Waits for the end; returns the seconds."""
        if self._events is None:
            return self._seconds
        begin, end = self._events
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


class LaunchedStep:
    """A step that the device computes.

    Args:
        states: of recurrent layers, of each batch row that has one.
        laid_out: if the device laid it out; there once the step has ended.
    """

    def __init__(
        self,
        results: Results,
        clock: Clock,
        what: str,
        states: SequenceOf[RowState | None] = (),
        laid_out: LaidOut | None = None,
    ) -> None:
        self._results, self._clock, self._what, self._states = results, clock, what, states
        self._laid_out = laid_out

    @property
    def written(self) -> Written:
        """On the device, once it has come so far; of a step that chooses tokens, before another one is laid out."""
        assert self._results.written is not None
        return self._results.written()

    def accept(self, row: int, nodes: list[int]) -> None:
        """Tells which nodes of a batch row's tree the walk accepted: its next step replays them."""
        if self._states and (state := self._states[row]) is not None:
            assert all(node < STATE_NODES for node in nodes), "a larger tree than `draft_limits` allows"
            state.nodes = nodes

    def wait(self) -> tuple[HostResults, float]:
        """Its results, and the seconds that the device took.

        Raises:
            DeviceMemoryError, DeviceLostError: as `runners.base.Runner.step`.
        """
        with device_errors(self._what):
            seconds = self._clock.wait()
            return self._results.on_host(self._laid_out), seconds


def sample_and_accept(
    logits: torch.Tensor, top: torch.Tensor, arrays: StepArrays, sampling: SamplingMetadata, kv: KVPages
) -> Callable[[], Written]:
    """Chooses the tokens after the rows of logits, and keeps what is accepted; the host does not wait.

    Args:
        logits: [R, vocab].
        top: int32[R, TOP + 1], as `Results.top`, in and out: the chosen token is the most probable one at first.

    Returns:
        What finds out what is written. Without drafts, only a step that follows asks for it.
    """
    sampled, batch_rows = top[:, -1], sampling.kinds.size
    offsets = arrays.buffer.host["logit_offsets"][: batch_rows + 1]
    if sampling.sequences:
        _sample(logits, sampled, arrays, sampling)
    largest = int((offsets[1:] - offsets[:-1]).max())
    accept = partial(_accept, top, arrays, kv, batch_rows, int(offsets[-1]), largest)
    if largest == 1:
        return accept
    written = accept()
    return lambda: written


def _accept(
    top: torch.Tensor, arrays: StepArrays, kv: KVPages, batch_rows: int, logit_rows: int, largest: int
) -> Written:
    sampled, nodes = top[:, -1], max(16, power_of_2(largest))
    moves = torch.empty((logit_rows, 2), dtype=torch.int64, device=top.device)
    counts, ends = torch.empty((2, batch_rows), dtype=torch.int32, device=top.device)
    tokens = torch.empty((batch_rows, nodes), dtype=torch.int32, device=top.device)
    launch(
        accept_paths,
        (batch_rows,),
        *(sampled, arrays.tokens, arrays.parents, arrays.slots, arrays.logit_rows, arrays.logit_offsets, arrays.kinds),
        *(arrays.positions, moves, counts, tokens, ends, sampled.stride(0)),
        NODES=nodes,
    )
    if largest > 1:
        kv.move(moves, arrays.logit_offsets, counts)
    return Written(tokens, counts, ends, arrays.tokens, arrays.parents, top, arrays.logit_offsets)


def log_probabilities(
    logits: torch.Tensor, sampled: torch.Tensor, arrays: StepArrays, sampling: SamplingMetadata
) -> tuple[torch.Tensor, ...] | None:
    """`Logprobs` on the host, which are there when the stream has come so far; None if no sequence reports any.

    Args:
        logits: [R, vocab].
        sampled: int32[R], the tokens that are written.
    """
    reporting = (sampling.logprobs >= 0).nonzero()[0]
    if not reporting.size:
        return None
    offsets, count = arrays.buffer.host["logit_offsets"], int(sampling.logprobs.max())
    rows = np.concatenate([np.arange(offsets[row], offsets[row + 1], dtype=np.int64) for row in reporting])
    wanted = to_device({"rows": rows}, logits.device)["rows"]
    scores = torch.log_softmax(logits[wanted].float(), -1)
    written = scores.gather(1, sampled[wanted].clamp(min=0).long()[:, None])[:, 0]
    values, tokens = scores.topk(count, dim=-1)
    on_host_parts = []
    for part in (written, tokens.int(), values):
        on_host = torch.zeros((logits.shape[0], *part.shape[1:]), dtype=part.dtype, pin_memory=logits.is_cuda)
        on_device = torch.zeros_like(on_host, device=logits.device).index_copy_(0, wanted, part)
        on_host_parts.append(on_host.copy_(on_device, non_blocking=True))
    return tuple(on_host_parts)


def _sample(logits: torch.Tensor, sampled: torch.Tensor, arrays: StepArrays, sampling: SamplingMetadata) -> None:
    vocab, offsets = logits.shape[1], arrays.buffer.host["logit_offsets"]
    rows = (sampling.kinds == SAMPLED).nonzero()[0]
    firsts, lasts = offsets[rows], offsets[rows + 1]
    tensors = to_device(SamplingTensors.of(sampling.sequences, firsts, lasts)._asdict(), logits.device)
    first, of_rows = int(firsts[0]), (tensors["row_sequences"], tensors["row_masks"])
    scores = torch.empty((int(lasts[-1]) - first, vocab), dtype=torch.float32, device=logits.device)
    weighed = any(sequence.params.top_p < 1.0 or sequence.params.min_p > 0.0 for sequence in sampling.sequences)
    weights = torch.empty_like(scores) if weighed else scores
    launch(
        adjust_scores,
        (scores.shape[0],),
        *(logits, scores, first, *of_rows, tensors["masks"]),
        *(arrays.logit_rows, arrays.parents, arrays.tokens, arrays.positions),
        *(tensors[name] for name in ("unlocked_at", "penalties", "offsets", "tokens", "counts", "biases", "flags")),
        *(vocab, logits.stride(0), tensors["masks"].shape[1]),
        BLOCK=SAMPLING_BLOCK,
        ENTRIES=SAMPLING_ENTRIES,
        **_AS_ON_HOST,
    )
    launch(
        sample_tokens,
        (scores.shape[0],),
        *(scores, weights, sampled, first, *of_rows, arrays.logit_rows, arrays.positions),
        *(tensors[name] for name in ("temperatures", "top_ks", "dropped_shares", "least_weights", "seeds")),
        *(vocab, sampled.stride(0)),
        BLOCK=SAMPLING_BLOCK,
        **_AS_ON_HOST,
    )


class Launched(Protocol):
    """`LaunchedStep`, on one device or several."""

    @property
    def written(self) -> Written: ...

    def wait(self) -> tuple[HostResults, float]: ...

    def accept(self, row: int, nodes: list[int]) -> None: ...


def sampling_of(batch: StepBatch, samplers: SequenceOf[TokenSampler | None]) -> SamplingMetadata:
    """How the device chooses the tokens of a step."""
    tokens, parents, offsets = batch.trees
    rows: list[SequenceSampling | int] = []
    for sampler, begin, end in zip(samplers, offsets[:-1], offsets[1:], strict=True):
        rows.append(ON_HOST if sampler is None else sampler.sampling(tokens[begin:end], parents[begin:end]))
    return SamplingMetadata.of(rows, [None if sampler is None else sampler.num_logprobs for sampler in samplers])


class CudaStep:
    """Implements `runners.base.StepInFlight`.

    Args:
        runner: moves keys and values for the host.
        batch, samplers: as for `Runner.begin`.
        sampling: that the device got.
    """

    def __init__(
        self,
        runner: Runner,
        batch: StepBatch,
        samplers: SequenceOf[TokenSampler | None],
        sampling: SamplingMetadata,
        launched: Launched,
    ) -> None:
        self._runner, self._batch, self._samplers = runner, batch, samplers
        self._sampling, self._launched = sampling, launched
        self._results: HostResults
        self._feedback: StepFeedback
        self.scores: Float32Array = np.zeros(0, np.float32)
        self.features: torch.Tensor | None = None

    @property
    def can_overlap(self) -> bool:
        """The host needs none of its logits, which are there only until another step begins."""
        rows = zip(self._samplers, self._sampling.kinds.tolist(), strict=True)
        on_device = all(sampler is None or kind != ON_HOST for sampler, kind in rows)
        return on_device and all(sequence.masks is None for sequence in self._sampling.sequences)

    @property
    def written(self) -> Written:
        """On the device, once it has come so far."""
        return self._launched.written

    def wait(self) -> tuple[StepFeedback, float]:
        self._results, seconds = self._launched.wait()
        self.features = self._results.predictions.features
        if self._results.laid_out is None:
            predictions = self._results.predictions
            self._feedback = self._batch.feedback(predictions.tokens, predictions.top_tokens)
        else:
            self._feedback = self._of_device(self._results.laid_out)
        return self._feedback, seconds

    def _of_device(self, laid_out: LaidOut) -> StepFeedback:
        """As `StepBatch.feedback` where the device made the drafts; drops the padding of their rows."""
        tokens, parents, scores = (part.numpy() for part in laid_out[:3])
        begins = self._batch.cu_seqlens
        is_root = np.zeros(tokens.shape[0], np.bool_)
        is_root[begins[:-1]] = True
        [kept] = (is_root | (parents >= 0)).nonzero()
        begin = begins[np.searchsorted(begins, kept, "right") - 1]
        offsets = np.searchsorted(kept, begins).astype(np.int32)
        self._results = self._results.part(kept)
        nodes = (segment_sizes(offsets) - 1)[laid_out.drafted]
        self.scores = scores[np.arange(scores.shape[1]) < nodes[:, None]]
        of_nodes = np.where(is_root[kept], -1, parents[kept] - begin).astype(np.int32)
        predictions = self._results.predictions
        return StepFeedback(tokens[kept], of_nodes, predictions.tokens, predictions.top_tokens, offsets)

    def verify(self, rows: SequenceOf[int]) -> list[AcceptedPath]:
        sampled, kinds = self._results.sampled, self._sampling.kinds
        assert sampled is not None
        on_host = [row for row in rows if kinds[row] == ON_HOST]
        host_paths = verify(self._samplers, self._feedback, self._results.predictions.logits, on_host, threads=1)
        paths = dict(zip(on_host, host_paths, strict=True))
        compact(self._runner, self._batch, paths)
        of_device = predicted_paths(self._feedback, sampled)
        accepted = [paths[row] if row in paths else self._accepted_path(row, of_device[row]) for row in rows]
        for row, path in zip(rows, accepted, strict=True):
            self._launched.accept(row, path.nodes)
        return accepted

    def _accepted_path(self, row: int, path: AcceptedPath) -> AcceptedPath:
        """The path along the tokens that the device chose; the host chooses the last one if the device could not."""
        sampler, begin = self._samplers[row], int(self._feedback.offsets[row])
        assert sampler is not None
        if self._sampling.kinds[row] == MOST_PROBABLE and sampler.num_logprobs is None:
            return path
        nodes, written = [0, *(node + 1 for node in path.nodes)], AcceptedPath([], path.nodes)
        try:
            for node, token in zip(nodes, path.token_ids, strict=True):
                token = self._sample(sampler, begin + node) if token == NOT_SAMPLED else self._accept(sampler, token)
                written.token_ids.append(token)
                if sampler.num_logprobs is not None:
                    written.logprobs.append(self._logprobs(sampler, begin + node, token))
                if sampler.ended:
                    written.nodes = path.nodes[: len(written.token_ids)]
                    break
        except Exception as error:
            written.error = error
        return written

    @staticmethod
    def _accept(sampler: TokenSampler, token: int) -> int:
        sampler.accept(token)
        return token

    def _sample(self, sampler: TokenSampler, row: int) -> int:
        predictions = self._results.predictions
        assert predictions.top_tokens is not None
        return sampler.sample_and_accept(predictions.logits[row], predictions.top_tokens[row].tolist())

    def _logprobs(self, sampler: TokenSampler, row: int, token: int) -> TokenLogprobs:
        logprobs, sampled = self._results.logprobs, self._results.sampled
        if logprobs is None or sampled is None or int(sampled[row]) != token:
            return sampler.logprobs(self._results.predictions.logits[row], token)
        return logprobs.at(row, sampler.num_logprobs or 0)
