"""Converts the server's messages to `results`, and joins a stream into one answer. Does no I/O."""

from __future__ import annotations

from draftwood.v1 import generation_pb2 as pb
from draftwood_client.protocol.convert import from_message
from draftwood_client.protocol.status import protocol_error
from draftwood_client.results import (
    Completion,
    Delta,
    DraftStatistics,
    DraftTree,
    EngineAbilities,
    Finished,
    FinishReason,
    GenerationDefaults,
    ModelInfo,
    Sample,
    SampleFinished,
    Started,
    Timings,
    TokenDetail,
    Tokenization,
    TokenLogprob,
    Usage,
)

_REASONS = {pb.FINISH_REASON_STOP: FinishReason.STOP, pb.FINISH_REASON_LENGTH: FinishReason.LENGTH}


class Answer:
    """One answer, built from its events: at most one Started, deltas, one Finished."""

    def __init__(self) -> None:
        self.started: Started | None = None
        self.finished: Finished | None = None
        self._deltas: list[Delta] = []

    def take(self, event: pb.GenerateResponse) -> Delta | None:
        """Adds an event; returns its delta if it is one. Ignores events of unknown kinds, and deltas without tokens,
        which keep up a cadence. The end of a sample counts.
        """
        match event.WhichOneof("event"):
            case "started":
                self.started = from_message(Started, event.started)
            case "finished":
                self.finished = _finished(event.finished)
            case "delta":
                if not (event.delta.token_ids or event.delta.text or event.delta.HasField("finished")):
                    return None
                delta = _delta(event.delta)
                self._deltas.append(delta)
                return delta
        return None

    @property
    def request_id(self) -> str:
        return self.started.request_id if self.started else ""

    def check_complete(self) -> None:
        """Raises `InternalError` if the stream ended with OK but without Started or Finished."""
        if self.started is None or self.finished is None:
            missing = "Finished" if self.started else "Started"
            raise protocol_error(f"the server ended the stream without {missing}", self.request_id)

    def completion(self) -> Completion:
        """The whole answer. Raises `InternalError` if it is not complete."""
        self.check_complete()
        assert self.started is not None
        assert self.finished is not None
        ends = self.finished.samples
        first = self._sample(0, SampleFinished(self.finished.reason, self.finished.matched_stop, self.started.seed))
        return Completion(
            text=first.text,
            token_ids=first.token_ids,
            finish_reason=first.finish_reason,
            matched_stop=first.matched_stop,
            usage=self.finished.usage,
            timings=self.finished.timings,
            drafting=self.finished.drafting,
            request_id=self.started.request_id,
            model=self.started.model,
            tenant=self.started.tenant,
            seed=first.seed,
            details=first.details,
            samples=tuple(self._sample(index, end) for index, end in enumerate(ends)),
            experiment=self.started.experiment,
            arm=self.started.arm,
        )

    def _sample(self, index: int, end: SampleFinished) -> Sample:
        deltas = [delta for delta in self._deltas if delta.sample == index]
        return Sample(
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(token for delta in deltas for token in delta.token_ids),
            finish_reason=end.reason,
            matched_stop=end.matched_stop,
            seed=end.seed,
            details=tuple(detail for delta in deltas for detail in delta.details),
        )


def tokenization(message: pb.TokenizeResponse) -> Tokenization:
    return from_message(Tokenization, message)


def model_info(message: pb.GetModelInfoResponse) -> ModelInfo:
    defaults = _generation_defaults(message.generation_defaults)
    if message.HasField("abilities"):
        return from_message(ModelInfo, message, generation_defaults=defaults)
    return from_message(ModelInfo, message, generation_defaults=defaults, abilities=EngineAbilities())


def _generation_defaults(message: pb.GenerationDefaults) -> GenerationDefaults:
    sampling, stop, constraints = message.sampling, message.stop, message.constraints
    return GenerationDefaults(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
        max_tokens=stop.max_tokens if stop.HasField("max_tokens") else None,
        min_tokens=stop.min_tokens,
        no_repeat_ngram_size=constraints.no_repeat_ngram_size,
        bad_words=tuple(tuple(words.ids) for words in constraints.bad_words),
        suppressed=tuple(constraints.suppressed),
        suppressed_first=tuple(constraints.suppressed_first),
        forced_last=tuple(constraints.forced_last),
    )


def _delta(message: pb.Delta) -> Delta:
    return Delta(
        message.text,
        tuple(message.token_ids),
        tuple(map(_detail, message.details)),
        message.sample,
        tuple(from_message(DraftTree, one) for one in message.draft_trees),
        _sample_finished(message.finished) if message.HasField("finished") else None,
    )


def _detail(message: pb.TokenDetail) -> TokenDetail:
    return TokenDetail(
        message.text,
        message.drafted,
        message.logprob if message.HasField("logprob") else None,
        tuple(from_message(TokenLogprob, one) for one in message.top_logprobs),
        message.token_bytes,
        message.left_out,
    )


def _finished(message: pb.Finished) -> Finished:
    return Finished(
        reason=_reason(message),
        matched_stop=_matched_stop(message),
        usage=from_message(Usage, message.usage),
        timings=from_message(Timings, message.timings),
        drafting=from_message(DraftStatistics, message.drafting),
        samples=tuple(map(_sample_finished, message.samples)),
    )


def _sample_finished(message: pb.SampleResult) -> SampleFinished:
    return SampleFinished(_reason(message), _matched_stop(message), message.seed)


def _reason(message: pb.Finished | pb.SampleResult) -> FinishReason:
    return _REASONS.get(message.reason, FinishReason.UNKNOWN)


def _matched_stop(message: pb.Finished | pb.SampleResult) -> str | int | None:
    stop = message.WhichOneof("matched_stop")
    return getattr(message, stop) if stop else None
