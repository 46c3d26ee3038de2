"""Converts the server's messages to `results`, and joins a stream into one answer. Does no I/O."""

from __future__ import annotations

from dataclasses import fields

from google.protobuf.duration_pb2 import Duration

from draftwood.v1 import generation_pb2 as pb
from draftwood_client._status import protocol_error
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
    SourceStatistics,
    Started,
    Timings,
    TokenDetail,
    Tokenization,
    Usage,
)
from draftwood_client.tools import ToolFormat

_REASONS = {pb.FINISH_REASON_STOP: FinishReason.STOP, pb.FINISH_REASON_LENGTH: FinishReason.LENGTH}


class Answer:
    """One answer, built from its events: at most one Started, deltas, one Finished."""

    def __init__(self) -> None:
        self.started: Started | None = None
        self.finished: Finished | None = None
        self._deltas: list[Delta] = []

    def take(self, event: pb.GenerateResponse) -> Delta | None:
        """Adds an event; returns its delta if it is one. Ignores events of unknown kinds, and deltas without tokens,
        which keep up a cadence.
        """
        match event.WhichOneof("event"):
            case "started":
                self.started = _started(event.started)
            case "finished":
                self.finished = _finished(event.finished)
            case "delta":
                if not (event.delta.token_ids or event.delta.text):
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
    return Tokenization(tuple(message.token_ids), tuple(message.tokens))


def model_info(message: pb.GetModelInfoResponse) -> ModelInfo:
    return ModelInfo(
        model=message.model,
        architecture=message.architecture,
        parameters=message.parameters,
        dtype=message.dtype,
        device=message.device,
        vocab_size=message.vocab_size,
        max_context_tokens=message.max_context_tokens,
        max_running_requests=message.max_running_requests,
        max_waiting_requests=message.max_waiting_requests,
        max_draft_nodes=message.max_draft_nodes,
        has_chat_template=message.has_chat_template,
        strategies=tuple(message.strategies),
        default_strategy=message.default_strategy,
        eos_token_ids=tuple(message.eos_token_ids),
        server_version=message.server_version,
        exact=message.exact,
        runner=message.runner,
        runner_reason=message.runner_reason,
        weights=message.weights,
        generation_defaults=_generation_defaults(message.generation_defaults),
        tool_format=_tool_format(message.tool_format) if message.HasField("tool_format") else None,
        no_tools_reason=message.no_tools_reason,
        abilities=_abilities(message.abilities) if message.HasField("abilities") else EngineAbilities(),
    )


def _abilities(message: pb.EngineAbilities) -> EngineAbilities:
    values = {one.name: getattr(message, one.name) for one in fields(EngineAbilities)}
    return EngineAbilities(**{**values, "formats": tuple(message.formats)})


def _tool_format(message: pb.ToolFormat) -> ToolFormat:
    return ToolFormat(
        begin=message.begin,
        end=message.end,
        between=message.between if message.HasField("between") else None,
        name_key=message.name_key,
        arguments_key=message.arguments_key,
    )


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


def _started(message: pb.Started) -> Started:
    return Started(
        request_id=message.request_id,
        model=message.model,
        tenant=message.tenant,
        strategy=message.strategy,
        prompt_tokens=message.prompt_tokens,
        max_tokens=message.max_tokens,
        seed=message.seed if message.HasField("seed") else None,
        experiment=message.experiment,
        arm=message.arm,
    )


def _delta(message: pb.Delta) -> Delta:
    return Delta(
        message.text,
        tuple(message.token_ids),
        tuple(map(_detail, message.details)),
        message.sample,
        tuple(map(_draft_tree, message.draft_trees)),
    )


def _draft_tree(message: pb.DraftTree) -> DraftTree:
    return DraftTree(tuple(message.token_ids), tuple(message.tokens), tuple(message.parents), tuple(message.accepted))


def _detail(message: pb.TokenDetail) -> TokenDetail:
    return TokenDetail(
        message.text,
        message.drafted,
        message.logprob if message.HasField("logprob") else None,
        tuple((top.token_id, top.logprob) for top in message.top_logprobs),
    )


def _finished(message: pb.Finished) -> Finished:
    usage, timings = message.usage, message.timings
    return Finished(
        reason=_reason(message),
        matched_stop=_matched_stop(message),
        usage=Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_prompt_tokens),
        timings=Timings(_seconds(timings.queue), _seconds(timings.prefill), _seconds(timings.decode)),
        drafting=_draft_statistics(message.drafting),
        samples=tuple(SampleFinished(_reason(end), _matched_stop(end), end.seed) for end in message.samples),
    )


def _reason(message: pb.Finished | pb.SampleResult) -> FinishReason:
    return _REASONS.get(message.reason, FinishReason.UNKNOWN)


def _matched_stop(message: pb.Finished | pb.SampleResult) -> str | int | None:
    stop = message.WhichOneof("matched_stop")
    return getattr(message, stop) if stop else None


def _draft_statistics(message: pb.DraftStatistics) -> DraftStatistics:
    return DraftStatistics(
        strategy=message.strategy,
        mean_acceptance_length=message.mean_acceptance_length,
        steps=message.steps,
        draft_tokens=message.draft_tokens,
        accepted_tokens=message.accepted_tokens,
        accepted_by_depth=tuple(message.accepted_by_depth),
        by_source={
            name: SourceStatistics(source.draft_tokens, source.accepted_tokens)
            for name, source in sorted(message.by_source.items())
        },
        draft_time=_seconds(message.draft_time),
        step_time=_seconds(message.step_time),
        model_time=_seconds(message.model_time),
        disabled_reason=message.disabled_reason,
    )


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos * 1e-9
