"""Sends the tokens of an answer: as they come, or at a fixed cadence."""

from __future__ import annotations

import asyncio
import math
import os
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from draftwood.v1 import generation_pb2 as pb
from draftwood_model_runner.output import Finish, FinishReason
from draftwood_model_runner.sequence import SequenceStats
from draftwood_service.engine.stream import MAX_PART_TOKENS, Output, Sample, Stream
from draftwood_service.errors import ClientDisconnectedError, ReaderStalledError
from draftwood_service.serving import TokenBytes
from draftwood_tenants.config import DeltaShaping

DeltaMessage = Callable[[Output], Message]
"""The message with the tokens of one or several steps."""
_SMALLEST = 2
"""Bytes of an empty entry of `padding`: tag and length."""
_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


async def relay(stream: Stream, writer: Writer, message: DeltaMessage, shaping: DeltaShaping) -> list[Finish]:
    """Sends the engine's outputs until all samples have finished; raises the first error of one."""
    if shaping.cadence:
        return await _relay_at_cadence(stream, writer, message, shaping)
    finishes: dict[int, Finish] = {}
    while len(finishes) < stream.slots:
        for pending in await stream.take():
            for part in pending.parts(with_end=stream.slots > 1):
                await writer.write(message(part))
            if pending.finish is not None:
                if pending.finish.error is not None:
                    raise pending.finish.error
                finishes[pending.sample] = pending.finish
    return [finishes[sample] for sample in range(stream.slots)]


async def _relay_at_cadence(
    stream: Stream, writer: Writer, message: DeltaMessage, shaping: DeltaShaping
) -> list[Finish]:
    """One delta for each sample at each multiple of the cadence from now on, until all have finished and are sent.

    A multiple that passes while the reader does not read is left out.
    """
    loop = asyncio.get_running_loop()
    began, multiple, sent = loop.time(), 0, 0
    queues = [Output(sample=sample) for sample in range(stream.slots)]
    while True:
        multiple = max(multiple + 1, math.ceil((loop.time() - began) / shaping.cadence))
        await _collect(stream, queues, began + multiple * shaping.cadence)
        for queue in queues:
            await writer.write(_next_delta(queue, message, shaping.max_delta_bytes))
        sent += 1
        finishes = [queue.finish for queue in queues if queue.finish is not None and not queue.token_ids]
        if len(finishes) == len(queues) and sent % shaping.rounding == 0:
            return finishes


async def _collect(stream: Stream, queues: SequenceOf[Output], until: float) -> None:
    """As `collect`, until a time of the event loop."""
    with suppress(TimeoutError):
        async with asyncio.timeout_at(until):
            while True:
                await collect(stream, queues)


async def collect(stream: Stream, queues: SequenceOf[Output]) -> None:
    """Adds the stream's next outputs to the queues of their samples; raises the first error of a sample or of the
    stream.
    """
    for pending in await stream.take():
        if pending.finish is not None and pending.finish.error is not None:
            raise pending.finish.error
        queues[pending.sample].add(pending)


def _next_delta(queue: Output, message: DeltaMessage, max_bytes: float) -> Message:
    """The message with the queue's first tokens, as many as fit but at least one if there are any; they leave it."""
    size = min(len(queue.token_ids), MAX_PART_TOKENS)
    fitting = bisect_right(range(1, size + 1), max_bytes, key=lambda count: message(queue.part(0, count)).ByteSize())
    count = min(max(fitting, 1), size)
    first = message(queue.part(0, count))
    queue.remove(count)
    return first


Request = TypeVar("Request")


class Writer:
    """Async context manager around a call's answer. A message that is not read within `stall_seconds` ends it.

    With `reading`, neither may the client let so long pass until its next message, or the end of its stream.

    Args:
        padding: responses of Generate are filled up to a multiple of so many bytes; 0 fills up none.

    One timer serves all messages: a timeout for each message would cost more than sending it.

    Raises:
        ReaderStalledError: on exit, if a message waited too long.
    """

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], stall_seconds: float, padding: int = 0) -> None:
        self._context = context
        self._padding = padding
        self._stall_seconds = stall_seconds
        self._waiting_since: float | None = None
        self._timeout = asyncio.timeout(None)

    async def write(self, message: Message) -> None:
        """Returns when gRPC has accepted the message.

        Raises:
            ClientDisconnectedError: the call has ended.
        """
        if self._padding and isinstance(message, pb.GenerateResponse):
            pad(message, self._padding)
        self._waiting_since = self._loop.time()
        try:
            await self._context.write(message)
        except grpc.aio.InternalError:
            raise ClientDisconnectedError() from None
        self._waiting_since = None

    async def reading(self, requests: AsyncIterator[Request]) -> AsyncIterator[Request]:
        """The messages of a client's stream."""
        while True:
            self._waiting_since = self._loop.time()
            try:
                request = await anext(requests)
            except StopAsyncIteration:
                return
            finally:
                self._waiting_since = None
            yield request

    async def __aenter__(self) -> Writer:
        await self._timeout.__aenter__()
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._stall_seconds, self._check)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError:
            raise ReaderStalledError(self._stall_seconds) from None

    def _check(self) -> None:
        now = self._loop.time()
        left = self._stall_seconds - (0.0 if self._waiting_since is None else now - self._waiting_since)
        if left <= 0:
            self._timeout.reschedule(now)
        else:
            self._timer = self._loop.call_later(left, self._check)


def pad(message: pb.GenerateResponse, multiple: int) -> None:
    """Adds random bytes, which no compression on the way removes, so that the serialized size is a multiple."""
    gap = -message.ByteSize() % multiple
    if gap == 0:
        return
    if gap < _SMALLEST:
        gap += multiple
    size = _entry(gap)
    if size is None:  # the length takes a byte too many or too few: an empty entry takes the difference
        message.padding.append(b"")
        size = _entry(gap - _SMALLEST)
        assert size is not None
    message.padding.append(os.urandom(size))


def _entry(gap: int) -> int | None:
    """Bytes in an entry of `padding` that takes `gap` bytes with its tag and length; None if there is no such entry."""
    for length_bytes in (1, 2, 3):
        size = gap - 1 - length_bytes
        if size >= 0 and max(1, math.ceil(size.bit_length() / 7)) == length_bytes:
            return size
    return None


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
            strategy=request.drafting.strategy,
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
    for name, counts in stats.sources(request.drafting.strategy).items():
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
