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
    NOT_CHOSEN,
    ON_HOST,
    SamplingMetadata,
    SequenceSampling,
)
from draftwood_model_runner.sampling.token_chooser import TokenChooser
from draftwood_model_runner.sampling.verification import AcceptedPath, predicted_paths, verify
from draftwood_strategies.base import StepFeedback


class Launched(Protocol):
    """`LaunchedStep`, on one device or several."""

    def wait(self) -> tuple[HostResults, float]: ...

    def accept(self, row: int, nodes: list[int]) -> None: ...


def sampling_of(batch: StepBatch, choosers: SequenceOf[TokenChooser | None]) -> SamplingMetadata:
    """How the device chooses the tokens of a step."""
    tokens, parents, offsets = batch.trees
    rows: list[SequenceSampling | int] = []
    for chooser, begin, end in zip(choosers, offsets[:-1], offsets[1:], strict=True):
        rows.append(ON_HOST if chooser is None else chooser.sampling(tokens[begin:end], parents[begin:end]))
    return SamplingMetadata.of(rows, [None if chooser is None else chooser.reported for chooser in choosers])


class CudaStep:
    """Implements `runners.base.StepInFlight`.

    Args:
        runner: moves keys and values for the host.
        batch, choosers: as for `Runner.begin`.
        sampling: that the device got.
    """

    def __init__(
        self,
        runner: Runner,
        batch: StepBatch,
        choosers: SequenceOf[TokenChooser | None],
        sampling: SamplingMetadata,
        launched: Launched,
    ) -> None:
        self._runner, self._batch, self._choosers = runner, batch, choosers
        self._sampling, self._launched = sampling, launched
        self._results: HostResults
        self._feedback: StepFeedback

    @property
    def can_overlap(self) -> bool:
        """The host needs none of its logits, which are there only until another step begins."""
        rows = zip(self._choosers, self._sampling.kinds.tolist(), strict=True)
        on_device = all(chooser is None or kind != ON_HOST for chooser, kind in rows)
        return on_device and all(one.masks is None for one in self._sampling.sequences)

    def wait(self) -> tuple[StepFeedback, float]:
        self._results, seconds = self._launched.wait()
        predictions = self._results.predictions
        self._feedback = self._batch.feedback(predictions.tokens, predictions.top_tokens)
        return self._feedback, seconds

    def verify(self, rows: SequenceOf[int]) -> list[AcceptedPath]:
        chosen, kinds = self._results.chosen, self._sampling.kinds
        assert chosen is not None
        on_host = [row for row in rows if kinds[row] == ON_HOST]
        found = verify(self._choosers, self._feedback, self._results.predictions.logits, on_host, threads=1)
        paths = dict(zip(on_host, found, strict=True))
        compact(self._runner, self._batch, paths)
        of_device = predicted_paths(self._feedback, chosen)
        accepted = [paths[row] if row in paths else self._remembered(row, of_device[row]) for row in rows]
        for row, path in zip(rows, accepted, strict=True):
            self._launched.accept(row, path.nodes)
        return accepted

    def _remembered(self, row: int, path: AcceptedPath) -> AcceptedPath:
        """The path along the tokens that the device chose; the host chooses the last one if the device could not."""
        chooser, begin = self._choosers[row], int(self._feedback.offsets[row])
        assert chooser is not None
        if self._sampling.kinds[row] == MOST_PROBABLE and chooser.reported is None:
            return path
        nodes, written = [0, *(node + 1 for node in path.nodes)], AcceptedPath([], path.nodes)
        try:
            for node, token in zip(nodes, path.token_ids, strict=True):
                token = self._choose(chooser, begin + node) if token == NOT_CHOSEN else self._remember(chooser, token)
                written.token_ids.append(token)
                if chooser.reported is not None:
                    written.logprobs.append(self._logprobs(chooser, begin + node, token))
                if chooser.ended:
                    written.nodes = path.nodes[: len(written.token_ids)]
                    break
        except Exception as error:
            written.error = error
        return written

    @staticmethod
    def _remember(chooser: TokenChooser, token: int) -> int:
        chooser.remember(token)
        return token

    def _choose(self, chooser: TokenChooser, row: int) -> int:
        predictions = self._results.predictions
        assert predictions.top_tokens is not None
        return chooser.choose(predictions.logits[row], predictions.top_tokens[row].tolist())

    def _logprobs(self, chooser: TokenChooser, row: int, token: int) -> TokenLogprobs:
        found, chosen = self._results.logprobs, self._results.chosen
        if found is None or chosen is None or int(chosen[row]) != token:
            return chooser.logprobs(self._results.predictions.logits[row], token)
        return found.at(row, chooser.reported or 0)
