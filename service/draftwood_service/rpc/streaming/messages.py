"""The messages of an answer, but for its first one."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from datetime import timedelta

from draftwood.v1 import generation_pb2 as pb
from draftwood_model_runner.output import Finish, FinishReason
from draftwood_model_runner.statistics import SequenceStats
from draftwood_service.engine.output import Output
from draftwood_service.engine.stream import Sample
from draftwood_service.serving import TokenBytes

_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


def delta(
    pending: Output, with_details: bool, token_bytes: TokenBytes, samples: SequenceOf[Sample]
) -> pb.GenerateResponse:
    """The message with the tokens of one or several steps, and with the finish of their sample if `pending` has it."""
    response = pb.GenerateResponse()
    message = response.delta
    message.text = "".join(pending.texts)
    message.token_ids.extend(pending.token_ids)
    message.sample = pending.sample
    if with_details:
        left_out = frozenset() if samples[0].request.include_special_tokens else token_bytes.special
        for token, text, drafted in zip(pending.token_ids, pending.texts, pending.drafted, strict=True):
            message.details.add(text=text, drafted=drafted, token_bytes=token_bytes(token), left_out=token in left_out)
        for detail, logprobs in zip(message.details, pending.logprobs, strict=False):
            detail.logprob = logprobs.logprob
            for token, logprob in zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True):
                detail.top_logprobs.add(token_id=token, logprob=logprob, token_bytes=token_bytes(token))
    for tree in pending.trees:
        texts = map(token_bytes.text, tree.token_ids)
        message.draft_trees.add(token_ids=tree.token_ids, tokens=texts, parents=tree.parents, accepted=tree.accepted)
    if pending.finish is not None and pending.finish.error is None:
        message.finished.CopyFrom(_sample_result(samples[pending.sample], pending.finish))
    return response


def finished(samples: SequenceOf[Sample], finishes: SequenceOf[Finish]) -> pb.GenerateResponse:
    """The last message of an answer, for all of its samples."""
    request, stats = samples[0].request, SequenceStats.over([sample.stats for sample in samples])
    written = sum(sample.completion_tokens for sample in samples)
    message = pb.Finished(
        reason=_REASONS[finishes[0].reason],
        stop_string=finishes[0].stop_string,
        stop_token_id=finishes[0].stop_token_id,
        usage=pb.Usage(
            prompt_tokens=request.prompt.size,
            completion_tokens=written,
            cached_prompt_tokens=samples[0].stats.cached_prompt_tokens,
        ),
        drafting=pb.DraftStatistics(
            strategy=request.strategy_name,
            mean_acceptance_length=written / max(stats.decode_steps, 1),
            steps=stats.decode_steps,
            draft_tokens=stats.draft_tokens,
            accepted_tokens=stats.accepted_tokens,
            accepted_by_depth=stats.accepted_by_depth,
            disabled_reason=stats.drafting_disabled_reason,
            draft_time=timedelta(seconds=stats.draft_seconds),
            step_time=timedelta(seconds=stats.step_seconds),
            model_time=timedelta(seconds=stats.model_seconds),
        ),
        timings=pb.Timings(
            queue=_between(stats.arrived_at, stats.first_scheduled_at),
            prefill=_between(stats.first_scheduled_at, stats.first_token_at),
            decode=_between(stats.first_token_at, stats.finished_at),
        ),
    )
    if len(samples) > 1:
        message.samples.extend(map(_sample_result, samples, finishes))
    for name, counts in stats.sources(request.strategy_name).items():
        source = message.drafting.by_source[name]
        source.draft_tokens, source.accepted_tokens = counts.verified, counts.accepted
    return pb.GenerateResponse(finished=message)


def _sample_result(sample: Sample, finish: Finish) -> pb.SampleResult:
    return pb.SampleResult(
        reason=_REASONS[finish.reason],
        stop_string=finish.stop_string,
        stop_token_id=finish.stop_token_id,
        completion_tokens=sample.completion_tokens,
        seed=sample.request.sampling.seed,
    )


def _between(start: float, end: float) -> timedelta:
    return timedelta(seconds=max(0.0, end - start))
