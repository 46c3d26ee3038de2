"""GenerationService: Generate, Tokenize, Detokenize, GetModelInfo.

Knows messages, streams and timing; threads are the bridge's, statuses are the error table's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence as SequenceOf
from importlib.metadata import version
from typing import Any

import numpy as np

from draftwood.v1 import generation_pb2 as pb
from model_runner.sequence import Finish, FinishReason, Sequence, SequenceStats
from service.engine.bridge import EngineBridge
from service.engine.stream import Pending, Stream
from service.errors import DeadlineExceededError
from service.rpc.calls import Call, Method
from service.rpc.request_log import RequestLog
from service.rpc.requests import (
    DEFAULT_TENANT,
    checked_name,
    read_prompt,
    read_samples,
    read_sequences,
    require_in_vocabulary,
)
from service.rpc.writer import Writer
from service.serving import Serving
from service.settings import Settings
from strategies import names

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"]

_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
_CLIENT_FIRST = 0.25
"""Seconds that we leave gRPC to end a call at the client's deadline, lest two statuses race."""
_AT_DEADLINE = 0.05
"""Seconds that a client's cancellation may come before the deadline, by our clock, and still be due to it."""
_FEW_TOKENS = 2048
"""Tokens that are turned into text at once; more go to a worker thread."""


class GenerationServicer:
    """The methods of GenerationService, for `rpc.handlers`."""

    def __init__(self, serving: Serving, bridge: EngineBridge, settings: Settings) -> None:
        self._serving = serving
        self._bridge = bridge
        self._settings = settings
        self._info = model_info(serving, settings)

    @property
    def methods(self) -> dict[str, Method]:
        return {
            "Generate": self.generate,
            "Tokenize": self.tokenize,
            "Detokenize": self.detokenize,
            "GetModelInfo": self.get_model_info,
        }

    async def generate(self, request: pb.GenerateRequest, call: Call) -> None:
        """Streams one Started, Deltas and one Finished, or raises what ends the call with one status."""
        tenant = checked_name("tenant", request.tenant) if request.tenant else DEFAULT_TENANT
        with RequestLog(call.request_id, tenant, call.arrived_at) as log:
            stream = self._bridge.admit(read_samples(request.sampling, self._settings.max_running))
            seconds = self._seconds(call)
            timer = asyncio.get_running_loop().call_later(seconds, stream.fail, DeadlineExceededError(seconds))
            try:
                log.sequences = sequences = await read_sequences(
                    request,
                    self._serving,
                    request_id=call.request_id,
                    tenant=tenant,
                    arrived_at=call.arrived_at,
                    deadline=time.perf_counter() + seconds,
                )
                stream.submit(*sequences)
                async with Writer(call.context, self._settings.stall_timeout) as writer:
                    await writer.write(self._started(sequences[0], tenant))
                    with_details = request.output.token_details or sequences[0].sampling.logprobs is not None
                    finishes = await relay(stream, writer, with_details)
                    await writer.write(finished(sequences, finishes))
                log.outcome = finishes[0].reason.value
            except asyncio.CancelledError:
                own = remaining(call)
                if own is not None and own < _AT_DEADLINE:
                    log.outcome = "deadline_exceeded"
                raise
            finally:
                timer.cancel()
                stream.close()

    async def tokenize(self, request: pb.TokenizeRequest, call: Call) -> pb.TokenizeResponse:
        ids = (await read_prompt(request, self._serving.model)).ids.tolist()
        decode = self._serving.model.tokenizer.decode

        def texts() -> list[str]:
            return [decode([token], include_special_tokens=True) for token in ids]

        tokens = texts() if len(ids) <= _FEW_TOKENS else await asyncio.to_thread(texts)
        return pb.TokenizeResponse(token_ids=ids, tokens=tokens)

    async def detokenize(self, request: pb.DetokenizeRequest, call: Call) -> pb.DetokenizeResponse:
        ids = np.array(request.token_ids, np.int32)
        require_in_vocabulary("token_ids", ids, self._serving.model.vocab_size)
        arguments = ids, request.include_special_tokens
        decode = self._serving.model.tokenizer.decode
        text = decode(*arguments) if ids.size <= _FEW_TOKENS else await asyncio.to_thread(decode, *arguments)
        return pb.DetokenizeResponse(text=text)

    async def get_model_info(self, request: pb.GetModelInfoRequest, call: Call) -> pb.GetModelInfoResponse:
        return self._info

    def _started(self, sequence: Sequence, tenant: str) -> pb.GenerateResponse:
        return pb.GenerateResponse(
            started=pb.Started(
                request_id=sequence.request_id,
                model=self._serving.model.name,
                tenant=tenant,
                strategy=sequence.strategy_name,
                prompt_tokens=sequence.prompt.size,
                max_tokens=sequence.stop.max_tokens,
                seed=sequence.sampling.seed,
            )
        )

    def _seconds(self, call: Call) -> float:
        """When we end the call: after the default or the maximum; gRPC itself ends it at the client's deadline."""
        own = remaining(call)
        return min(self._settings.default_timeout if own is None else own + _CLIENT_FIRST, self._settings.max_timeout)


def remaining(call: Call) -> float | None:
    """Seconds until the client's deadline; None where it set none."""
    seconds: float | None = call.context.time_remaining()
    return seconds


async def relay(stream: Stream, writer: Writer, with_details: bool) -> list[Finish]:
    """Sends what the engine writes until all samples end; raises the first error that one ends with."""
    finishes: dict[int, Finish] = {}
    while len(finishes) < stream.places:
        for pending in await stream.take():
            for part in pending.parts():
                await writer.write(delta(part, with_details))
            if pending.finish is not None:
                if pending.finish.error is not None:
                    raise pending.finish.error
                finishes[pending.sample] = pending.finish
    return [finishes[sample] for sample in range(stream.places)]


def delta(pending: Pending, with_details: bool) -> pb.GenerateResponse:
    """The message of one or several steps' tokens."""
    response = pb.GenerateResponse()
    message = response.delta
    message.text = "".join(pending.texts)
    message.token_ids.extend(pending.token_ids)
    message.sample = pending.sample
    if with_details:
        for text, drafted in zip(pending.texts, pending.drafted, strict=True):
            message.details.add(text=text, drafted=drafted)
        for detail, logprobs in zip(message.details, pending.logprobs, strict=False):
            detail.logprob = logprobs.logprob
            for token, logprob in zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True):
                detail.top_logprobs.add(token_id=token, logprob=logprob)
    return response


def finished(sequences: SequenceOf[Sequence], finishes: SequenceOf[Finish]) -> pb.GenerateResponse:
    """The last message of an answer: of its one sample, or of all of them."""
    first, stats = sequences[0], SequenceStats.over([sequence.stats for sequence in sequences])
    written = [len(sequence.output) for sequence in sequences]
    message = pb.Finished(
        reason=_REASONS[finishes[0].reason],
        stop_string=finishes[0].stop_string,
        stop_token_id=finishes[0].stop_token_id,
        usage=pb.Usage(
            prompt_tokens=first.prompt.size,
            completion_tokens=sum(written),
            cached_prompt_tokens=first.stats.cached_prompt_tokens,
        ),
        drafting=pb.DraftStatistics(
            strategy=first.strategy_name,
            mean_acceptance_length=sum(written) / max(stats.decode_steps, 1),
            steps=stats.decode_steps,
            draft_tokens=stats.draft_tokens,
            accepted_tokens=stats.accepted_tokens,
            accepted_by_depth=stats.accepted_by_depth,
            disabled_reason=stats.drafting_disabled_reason,
        ),
    )
    if len(sequences) > 1:
        for sequence, finish, tokens in zip(sequences, finishes, written, strict=True):
            message.samples.add(
                reason=_REASONS[finish.reason],
                stop_string=finish.stop_string,
                stop_token_id=finish.stop_token_id,
                completion_tokens=tokens,
                seed=sequence.sampling.seed,
            )
    for name, counts in stats.sources(first.strategy_name).items():
        source = message.drafting.by_source[name]
        source.draft_tokens, source.accepted_tokens = counts.verified, counts.accepted
    _set_seconds(message.timings.queue, stats.first_scheduled_at - stats.arrived_at)
    _set_seconds(message.timings.prefill, stats.first_token_at - stats.first_scheduled_at)
    _set_seconds(message.timings.decode, stats.finished_at - stats.first_token_at)
    _set_seconds(message.drafting.draft_time, stats.draft_seconds)
    _set_seconds(message.drafting.step_time, stats.step_seconds)
    _set_seconds(message.drafting.model_time, stats.model_seconds)
    return pb.GenerateResponse(finished=message)


def model_info(serving: Serving, settings: Settings) -> pb.GetModelInfoResponse:
    """What a client may want to know before it asks."""
    model = serving.model
    return pb.GetModelInfoResponse(
        model=model.name,
        architecture=model.architecture,
        parameters=model.parameters,
        dtype=model.dtype,
        device=model.device,
        vocab_size=model.vocab_size,
        max_context_tokens=model.max_context,
        max_running_requests=settings.max_running,
        max_waiting_requests=settings.max_waiting,
        max_draft_nodes=serving.max_draft_nodes,
        has_chat_template=model.tokenizer.has_chat_template,
        strategies=names(),
        default_strategy=serving.default_strategy,
        eos_token_ids=sorted(model.eos_token_ids),
        server_version=version("draftwood"),
        exact=model.exact,
    )


def _set_seconds(duration: Any, seconds: float) -> None:
    duration.FromNanoseconds(max(0, round(seconds * 1e9)))
