"""What sequences write: their tokens are chosen, become text, and a stop condition ends them. No torch."""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

import numpy as np

from draftwood_model_runner.drafting.draft_policy import Outcomes
from draftwood_model_runner.execution.begun_step import BegunStep
from draftwood_model_runner.loading.loaded import LoadedModel
from draftwood_model_runner.output import StepOutput, VerifiedTree
from draftwood_model_runner.sampling.output_text import OutputText
from draftwood_model_runner.sampling.token_chooser import TokenChooser
from draftwood_model_runner.sampling.verification import AcceptedPath
from draftwood_model_runner.scheduling.scheduler import ScheduledSequence
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies.base import StepFeedback
from draftwood_strategies.native import sizes_between


class _Writer(NamedTuple):
    """The state of one sequence that choosing tokens and turning them into text needs, from first to last."""

    chooser: TokenChooser
    text: OutputText


class SequenceWriters:
    """Those of the live sequences that have run."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._writers: dict[Sequence, _Writer] = {}

    @property
    def sequences(self) -> Set[Sequence]:
        return self._writers.keys()

    def start(self, sequence: Sequence) -> None:
        """Prepares to write a sequence, whose output is empty."""
        model, request, eos = self._model, sequence.request, self._model.eos_token_ids
        chooser = TokenChooser(sequence, eos, model.vocab_size, model.defaults.constraints)
        decoder = model.tokenizer.stream(request.prompt, request.include_special_tokens)
        self._writers[sequence] = _Writer(chooser, OutputText(decoder, request.stop, eos))

    def close(self, sequence: Sequence) -> None:
        """Does nothing for a sequence that was not started."""
        self._writers.pop(sequence, None)

    def choosers(self, scheduled: list[ScheduledSequence]) -> list[TokenChooser | None]:
        """Of each sequence; None for one that writes nothing in the step, since its prompt goes on."""
        return [self._writers[one.sequence].chooser if one.reaches_end else None for one in scheduled]

    def write(self, sequence: Sequence, path: AcceptedPath) -> StepOutput | Exception:
        """What a sequence writes in a step, up to the token that ends it; or the error that ends it."""
        try:
            texts, finish = self._writers[sequence].text.write(path.token_ids)
        except Exception as error:
            return error
        if finish is not None:
            path = path.cut(len(texts))
        elif path.error is not None:
            return path.error
        accepted = len(path.nodes)
        sequence.committed += accepted
        sequence.output.extend(path.token_ids)
        drafted = [True] * accepted + [False] * (len(path.token_ids) - accepted)
        return StepOutput(sequence, path.token_ids, texts, drafted, finish, path.logprobs)


class Written:
    """What the sequences of a step wrote, for their clients and for the drafters.

    Attributes:
        outputs: of each sequence that wrote.
    """

    def __init__(self, step: BegunStep, feedback: StepFeedback) -> None:
        self.outputs: list[StepOutput] = []
        self._step, self._feedback = step, feedback
        self._nodes = (sizes_between(feedback.begins) - 1).tolist()
        self._rows: list[int] = []
        self._accepted: list[int] = []

    def add(self, row: int, output: StepOutput, path: AcceptedPath) -> None:
        """The output of a batch row, which has come of a path."""
        accepted = sum(output.drafted)
        output.sequence.stats.record_step(self._nodes[row], accepted)
        if output.sequence.request.draft_trees:
            own = self._feedback.of_row(row)
            tokens, parents = self._feedback.tokens[own][1:], self._feedback.parents[own][1:] - 1  # without the root
            output.tree = VerifiedTree(tokens.tolist(), parents.tolist(), path.nodes[:accepted])
        self.outputs.append(output)
        self._rows.append(row)
        self._accepted.append(accepted)

    def outcomes(self, model_seconds: float) -> Outcomes:
        """For the drafters; of one output at least.

        Args:
            model_seconds: what the forward pass took.
        """
        all_rows = len(self._rows) == len(self._nodes)
        tokens = [one.token_ids for one in self.outputs]
        return Outcomes(
            sequences=[one.sequence for one in self.outputs],
            written=np.array([token for of_one in tokens for token in of_one], np.int32),
            begins=np.cumsum([0, *map(len, tokens)], dtype=np.int32),
            accepted=self._accepted,
            feedback=self._feedback if all_rows else self._feedback.part(self._rows),
            model_seconds=model_seconds,
            sharing=len(self._step.scheduled),
        )
