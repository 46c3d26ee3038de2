"""Verifies the draft trees of a step: by the tokens that the device chose, and on the host if it could not."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from draftwood_model_runner.output import TokenLogprobs
from draftwood_model_runner.runners.base import Runner, StepBatch
from draftwood_model_runner.runners.cuda.steps.results import HostResults
from draftwood_model_runner.runners.host_step import compact
from draftwood_model_runner.sampling.metadata import (
    MOST_PROBABLE,
    NOT_SAMPLED,
    ON_HOST,
    SamplingMetadata,
    SequenceSampling,
)
from draftwood_model_runner.sampling.token_sampler import TokenSampler
from draftwood_model_runner.sampling.verification import AcceptedPath, predicted_paths, verify
from draftwood_strategies.base import StepFeedback


class Launched(Protocol):
    """`LaunchedStep`, on one device or several."""

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

    @property
    def can_overlap(self) -> bool:
        """The host needs none of its logits, which are there only until another step begins."""
        rows = zip(self._samplers, self._sampling.kinds.tolist(), strict=True)
        on_device = all(sampler is None or kind != ON_HOST for sampler, kind in rows)
        return on_device and all(one.masks is None for one in self._sampling.sequences)

    def wait(self) -> tuple[StepFeedback, float]:
        self._results, seconds = self._launched.wait()
        predictions = self._results.predictions
        self._feedback = self._batch.feedback(predictions.tokens, predictions.top_tokens)
        return self._feedback, seconds

    def verify(self, rows: SequenceOf[int]) -> list[AcceptedPath]:
        sampled, kinds = self._results.sampled, self._sampling.kinds
        assert sampled is not None
        on_host = [row for row in rows if kinds[row] == ON_HOST]
        found = verify(self._samplers, self._feedback, self._results.predictions.logits, on_host, threads=1)
        paths = dict(zip(on_host, found, strict=True))
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
        found, sampled = self._results.logprobs, self._results.sampled
        if found is None or sampled is None or int(sampled[row]) != token:
            return sampler.logprobs(self._results.predictions.logits[row], token)
        return found.at(row, sampler.num_logprobs or 0)
