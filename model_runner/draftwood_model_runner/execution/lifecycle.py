"""How sequences enter the engine, begin to run, and end: whatever they hold is freed once. No torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from draftwood_model_runner.drafting.draft_policy import DraftPolicy
from draftwood_model_runner.engine_config import EngineConfig
from draftwood_model_runner.errors import DeadlineError, InvalidValueError, ModelError
from draftwood_model_runner.execution.writers import SequenceWriters
from draftwood_model_runner.loading.facts import ModelFacts
from draftwood_model_runner.output import StepOutput
from draftwood_model_runner.scheduling.scheduler import Scheduler
from draftwood_model_runner.sequence import Sequence, SequenceState

_log = logging.getLogger(__name__)


def check_fits(sequence: Sequence, model: ModelFacts, config: EngineConfig) -> None:
    """Raises InvalidValueError if it does not fit the context or vocabulary of the model, or asks for too wide a
    draft."""
    request, limit, vocab, most = sequence.request, model.max_context, model.vocab_size, config.max_draft_nodes
    if sequence.longest > limit:
        raise InvalidValueError(
            "prompt", sequence.longest, f"prompt and max_tokens together are at most {limit} tokens"
        )
    if not 0 <= int(request.prompt.min()) <= int(request.prompt.max()) < vocab:
        raise InvalidValueError("prompt", request.prompt, f"token ids lie in [0, {vocab})")
    if not 0 <= request.max_draft_nodes <= most:
        raise InvalidValueError("max_draft_nodes", request.max_draft_nodes, f"it must lie in [0, {most}]")


class LiveSequences:
    """What live sequences hold: slots and pages by the scheduler, drafters by the policy, and writers."""

    def __init__(self, scheduler: Scheduler, policy: DraftPolicy, writers: SequenceWriters) -> None:
        self._scheduler, self._policy, self._writers = scheduler, policy, writers

    def start(self, sequences: Iterable[Sequence], now: float) -> None:
        """Gives each of these sequences that runs for the first time what it needs to draft and to write."""
        for sequence in sequences:
            if sequence not in self._writers.sequences:
                sequence.stats.first_scheduled_at = now
                self._policy.start(sequence)
                self._writers.start(sequence)

    def finish(self, sequence: Sequence, keep: bool = True) -> None:
        """Frees all that a sequence holds; does nothing for one that has ended.

        Args:
            keep: its keys and values are valid.
        """
        if sequence.state is SequenceState.FINISHED:
            return
        self._scheduler.finish(sequence, keep)
        sequence.stats.finished_at = time.perf_counter()
        self._writers.close(sequence)
        self._policy.close(sequence)

    def fail(self, sequence: Sequence, error: Exception, keep: bool = False) -> StepOutput:
        """Ends a sequence by an error; `keep` as for `finish`."""
        self.finish(sequence, keep)
        return StepOutput.failed(sequence, error)

    def fail_step(self, sequences: SequenceOf[Sequence], cause: Exception) -> list[StepOutput]:
        """Ends the sequences of a step that failed in the model."""
        _log.error("the model failed in a step of %d sequences", len(sequences), exc_info=cause)
        outputs = []
        for sequence in sequences:
            error = ModelError(f"the model failed: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
            if sequence.state is not SequenceState.FINISHED:
                outputs.append(self.fail(sequence, error))
        return outputs

    def expire(self, now: float) -> list[StepOutput]:
        """Ends the sequences that missed their deadline or cannot meet it any more."""
        outputs = []
        for sequence in self._scheduler.overdue(now):
            assert sequence.request.deadline is not None
            outputs.append(self.fail(sequence, DeadlineError(now - sequence.request.deadline), keep=True))
        return outputs

    def check(self, others: SequenceOf[Sequence] = ()) -> None:
        """Asserts that slots, KV pages, drafters and writers are held by live sequences that have run, and by no
        others; `others` hold pages as well."""
        self._scheduler.check(others)
        assert self._writers.sequences == self._policy.sequences
        assert self._writers.sequences <= {*self._scheduler.live}
