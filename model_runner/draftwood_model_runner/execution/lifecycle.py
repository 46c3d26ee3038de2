"""How sequences enter the engine, begin to run, write, and end: whatever they hold is freed once. No torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from draftwood_model_runner.drafting.draft_policy import DraftPolicy
from draftwood_model_runner.engine_config import EngineConfig
from draftwood_model_runner.errors import DeadlineError, InvalidValueError, ModelError
from draftwood_model_runner.loading.facts import ModelFacts
from draftwood_model_runner.loading.loaded import LoadedModel
from draftwood_model_runner.output import StepOutput
from draftwood_model_runner.sampling.output_text import OutputText
from draftwood_model_runner.sampling.token_sampler import TokenSampler
from draftwood_model_runner.sampling.verification import AcceptedPath
from draftwood_model_runner.scheduling.scheduler import ScheduledSequence, Scheduler
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


class _Writer(NamedTuple):
    """The state of one sequence that choosing tokens and turning them into text needs, from first to last."""

    sampler: TokenSampler
    text: OutputText


class LiveSequences:
    """What they hold: slots and pages by the scheduler, drafters by the policy; and once they ran, writers."""

    def __init__(self, model: LoadedModel, scheduler: Scheduler, policy: DraftPolicy) -> None:
        self._model, self._scheduler, self._policy = model, scheduler, policy
        self._writers: dict[Sequence, _Writer] = {}

    def start(self, sequences: SequenceOf[Sequence], now: float) -> list[StepOutput]:
        """Gives each of these sequences that runs for the first time what it needs to draft and to write. Returns the
        errors of those for which that fails; they have ended."""
        failed = []
        for sequence in sequences:
            if sequence not in self._writers:
                sequence.stats.first_scheduled_at = now
                try:
                    self._writers[sequence] = self._writer(sequence)
                    self._policy.start(sequence)
                except Exception as error:
                    _log.exception("request %r cannot be begun", sequence.request.request_id)
                    failed.append(self.fail(sequence, error))
        return failed

    def _writer(self, sequence: Sequence) -> _Writer:
        model, request, eos = self._model, sequence.request, self._model.eos_token_ids
        sampler = TokenSampler(sequence, eos, model.vocab_size, model.defaults.constraints)
        decoder = model.tokenizer.stream(request.include_special_tokens)
        return _Writer(sampler, OutputText(decoder, request.stop, eos))

    def samplers(self, scheduled: list[ScheduledSequence]) -> list[TokenSampler | None]:
        """Of each sequence; None for one that writes nothing in the step, since its prompt goes on."""
        return [self._writers[one.sequence].sampler if one.reaches_end else None for one in scheduled]

    def write(self, sequence: Sequence, path: AcceptedPath, verified: int) -> StepOutput | Exception:
        """What a sequence writes in a step, up to the token that ends it; or the error that ends it.

        Args:
            verified: draft tokens of the step.
        """
        sampler, text = self._writers[sequence]
        try:
            texts, finish = text.write(path.token_ids)
            if finish is None and sampler.complete:
                rest, finish = text.end()
                texts[-1] += rest
        except Exception as error:
            return error
        if finish is not None:
            path = path.cut(len(texts))
        elif path.error is not None:
            return path.error
        accepted = len(path.nodes)
        sequence.committed += accepted
        sequence.output.extend(path.token_ids)
        sequence.stats.record_step(verified, accepted)
        drafted = [True] * accepted + [False] * (len(path.token_ids) - accepted)
        return StepOutput(sequence, path.token_ids, texts, drafted, finish, path.logprobs)

    def finish(self, sequence: Sequence, keep: bool = True) -> None:
        """Frees all that a sequence holds; does nothing for one that has ended.

        Args:
            keep: its keys and values are valid.
        """
        if sequence.state is SequenceState.FINISHED:
            return
        self._scheduler.finish(sequence, keep)
        sequence.stats.finished_at = time.perf_counter()
        self._writers.pop(sequence, None)
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
        assert self._writers.keys() == self._policy.sequences
        assert self._writers.keys() <= {*self._scheduler.live}
