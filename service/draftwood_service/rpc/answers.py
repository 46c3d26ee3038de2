"""Makes the messages of an answer from the engine's outputs, and sends them: as they come, at a fixed cadence, or
whole."""

from __future__ import annotations

import asyncio
import math
import os
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from draftwood.v1 import generation_pb2 as pb
from draftwood_model_runner.errors import InvalidInputError, InvalidValueError
from draftwood_model_runner.output import Finish, FinishReason
from draftwood_model_runner.request import Request as EngineRequest
from draftwood_model_runner.sequence import SequenceStats
from draftwood_service.engine.stream import MAX_PART_TOKENS, MAX_TREES, Output, Sample, Stream
from draftwood_service.errors import ClientDisconnectedError, ReaderStalledError
from draftwood_service.rpc.parts import AnswerReader, joined, whole_parts
from draftwood_service.serving import TokenBytes
from draftwood_tenants.config import DeltaShaping

MAX_ANSWER_BYTES = 4 * 2**20
"""gRPC's default limit of received messages."""
_DETAIL_BYTES, _ALTERNATIVE_BYTES, _NODE_BYTES = 64, 48, 16
"""Of a token's detail, one of its alternatives, and a node of a draft tree in an answer, on average of any text."""
_TOKEN_BYTES = 8
"""Of a token and its text in an answer, on average."""
_SMALLEST = 2
"""Bytes of an empty entry of `padding`: tag and length."""
_PIECE_CHARACTERS = 8
"""Of text in a delta of a fixed size, which are moved to the next one together."""
_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}


@dataclass(frozen=True, slots=True)
class AnswerMessages:
    """Makes the messages of one request's answer.

    Attributes:
        samples, readers: one of each for each sample.
        with_details: of each token.
    """

    samples: SequenceOf[Sample]
    readers: SequenceOf[AnswerReader]
    with_details: bool
    token_bytes: TokenBytes

    def read(self, output: Output) -> list[pb.Part]:
        """The parts that an output adds to those of its sample; at its end all that is left."""
        reader, parts = self.readers[output.sample], list[pb.Part]()
        if reader.is_plain:
            text = "".join(output.texts)
            return [pb.Part(text=text)] if text else []
        for text in output.texts:
            parts += reader.push(text)
        if output.finish is not None and output.finish.error is None:
            parts += reader.close()
        return joined(parts)

    def delta(self, output: Output, parts: SequenceOf[pb.Part]) -> pb.GenerateStreamResponse:
        """The message with the tokens of one or several steps, and with the end of their sample if `output` has it."""
        response = pb.GenerateStreamResponse()
        message = response.delta
        message.sample = output.sample
        message.parts.extend(parts)
        self._fill(message, output)
        if output.finish is not None and output.finish.error is None:
            message.result.CopyFrom(self._result(output.sample, output.finish))
        return response

    def finished(self, finishes: SequenceOf[Finish]) -> pb.GenerateStreamResponse:
        """The last message of a stream, for all of its samples."""
        message = pb.Finished(
            samples=[self._result(sample, finish) for sample, finish in enumerate(finishes)],
            usage=self._usage(),
            timings=self._timings(),
            drafting=self._drafting(),
        )
        return pb.GenerateStreamResponse(finished=message)

    def whole(self, started: pb.Started, outputs: SequenceOf[Output]) -> pb.GenerateResponse:
        """The whole answer.

        Args:
            outputs: all of each sample.
        """
        response = pb.GenerateResponse(started=started)
        for output in outputs:
            assert output.finish is not None
            answer = response.answers.add(parts=whole_parts(self.read(output)))
            self._fill(answer, output)
            answer.result.CopyFrom(self._result(output.sample, output.finish))
        response.usage.CopyFrom(self._usage())
        response.timings.CopyFrom(self._timings())
        response.drafting.CopyFrom(self._drafting())
        return response

    def _fill(self, message: pb.Delta | pb.Answer, output: Output) -> None:
        """Adds tokens, details and draft trees."""
        token_bytes = self.token_bytes
        message.token_ids.extend(output.token_ids)
        if self.with_details:
            left_out = frozenset() if self.samples[0].request.include_special_tokens else token_bytes.special
            for token, text, drafted in zip(output.token_ids, output.texts, output.drafted, strict=True):
                written = token_bytes(token)
                message.details.add(
                    token_id=token, text=text, bytes=written, special=token in left_out, drafted=drafted
                )
            for detail, logprobs in zip(message.details, output.logprobs, strict=False):
                detail.logprob = logprobs.logprob
                for token, logprob in zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True):
                    detail.top_logprobs.add(
                        token_id=token, text=token_bytes.text(token), bytes=token_bytes(token), logprob=logprob
                    )
        for tree in output.trees:
            texts = map(token_bytes.text, tree.token_ids)
            message.draft_trees.add(
                token_ids=tree.token_ids, tokens=texts, parents=tree.parents, accepted=tree.accepted
            )

    def _result(self, number: int, finish: Finish) -> pb.SampleResult:
        sample, reader = self.samples[number], self.readers[number]
        reason, sampling = _REASONS[finish.reason], sample.request.sampling
        return pb.SampleResult(
            reason=pb.FINISH_REASON_TOOL_CALLS if reason == pb.FINISH_REASON_STOP and reader.calls else reason,
            stop_string=finish.stop_string,
            stop_token_id=finish.stop_token_id,
            usage=pb.SampleUsage(
                completion_tokens=sample.completion_tokens,
                reasoning_tokens=reader.reasoning_tokens,
                accepted_draft_tokens=sample.stats.accepted_tokens,
            ),
            seed=sampling.seed if sampling.temperature else None,
        )

    def _usage(self) -> pb.Usage:
        reasoning = [reader.reasoning_tokens for reader in self.readers if reader.reasoning_tokens is not None]
        return pb.Usage(
            prompt_tokens=self.samples[0].request.prompt.size,
            cached_prompt_tokens=self.samples[0].stats.cached_prompt_tokens,
            completion_tokens=sum(sample.completion_tokens for sample in self.samples),
            reasoning_tokens=sum(reasoning) if reasoning else None,
        )

    def _stats(self) -> SequenceStats:
        return SequenceStats.over([sample.stats for sample in self.samples])

    def _timings(self) -> pb.Timings:
        stats = self._stats()
        return pb.Timings(
            queue=_between(stats.arrived_at, stats.first_scheduled_at),
            prefill=_between(stats.first_scheduled_at, stats.first_token_at),
            decode=_between(stats.first_token_at, stats.finished_at),
        )

    def _drafting(self) -> pb.DraftStatistics:
        stats = self._stats()
        written = sum(sample.completion_tokens for sample in self.samples)
        message = pb.DraftStatistics(
            mean_acceptance_length=written / max(stats.decode_steps, 1),
            steps=stats.decode_steps,
            draft_tokens=stats.draft_tokens,
            accepted_tokens=stats.accepted_tokens,
            accepted_by_depth=stats.accepted_by_depth,
            disabled_reason=stats.drafting_disabled_reason,
            draft_duration=timedelta(seconds=stats.draft_seconds),
            step_duration=timedelta(seconds=stats.step_seconds),
            model_duration=timedelta(seconds=stats.model_seconds),
        )
        for name, counts in stats.sources(self.samples[0].request.drafting.strategy).items():
            source = message.by_source[name]
            source.draft_tokens, source.accepted_tokens = counts.verified, counts.accepted
        return message


def require_size_of_whole(
    requests: SequenceOf[EngineRequest], with_details: bool, draft_trees: bool, max_nodes: int
) -> None:
    """Refuses before any work what could make a whole answer too large for gRPC's clients: details of each token.

    Texts alone are not refused: an answer of 4 MiB has some million tokens.

    Raises:
        InvalidInputError: the draft trees of so many samples are too large.
        InvalidValueError: so many tokens with details are.
    """
    first = requests[0]
    left = MAX_ANSWER_BYTES - (len(requests) * MAX_TREES * max_nodes * _NODE_BYTES if draft_trees else 0)
    if left <= 0:
        raise InvalidInputError("output.draft_trees", None, "are too large for one message; call GenerateStream")
    if not with_details:
        return
    of_token = _TOKEN_BYTES + _DETAIL_BYTES + _ALTERNATIVE_BYTES * (first.sampling.logprobs or 0)
    limit = left // (of_token * len(requests))
    if first.stop.max_tokens > limit:
        allowed = f"with these details in one message it must be at most {limit}; call GenerateStream for more"
        raise InvalidValueError("stop.max_tokens", first.stop.max_tokens, allowed)


async def relay(stream: Stream, writer: Writer, messages: AnswerMessages, shaping: DeltaShaping) -> list[Finish]:
    """Sends the engine's outputs until all samples have finished; raises the first error of one."""
    if shaping.cadence:
        return await _relay_at_cadence(stream, writer, messages, shaping)
    finishes: dict[int, Finish] = {}
    while len(finishes) < stream.slots:
        for pending in await stream.take():
            for part in pending.parts():
                await writer.write(messages.delta(part, messages.read(part)))
            if pending.finish is not None:
                if pending.finish.error is not None:
                    raise pending.finish.error
                finishes[pending.sample] = pending.finish
    return [finishes[sample] for sample in range(stream.slots)]


async def gather(stream: Stream, shaping: DeltaShaping) -> list[Output]:
    """All outputs of each sample, once all have finished: at a cadence, at a time when a stream would end, too. Raises
    the first error of a sample, or of the stream."""
    loop = asyncio.get_running_loop()
    began, outputs = loop.time(), [Output(sample=sample) for sample in range(stream.slots)]
    while not all(output.finish is not None for output in outputs):
        for pending in await stream.take():
            _require_good(pending)
            outputs[pending.sample].add(pending)
    if shaping.cadence:
        period = shaping.cadence * shaping.rounding
        ends = began + max(math.ceil((loop.time() - began) / period), 1) * period
        with suppress(TimeoutError):
            async with asyncio.timeout_at(ends):
                await stream.take()  # nothing comes but an error, such as that of a deadline
    return outputs


def padding_of_whole(shaping: DeltaShaping, requests: SequenceOf[EngineRequest], size: int) -> int:
    """What a whole answer of so many bytes is filled up to a multiple of; 0 for nothing.

    With a cadence the size tells as little as that of a stream, which says how long the answer took: it is a power of
    two of messages, and not less than what `max_tokens` usually need.
    """
    if not (shaping.cadence and shaping.padding):
        return shaping.padding
    needed = max(size, _TOKEN_BYTES * sum(request.stop.max_tokens for request in requests))
    needed = size if needed > MAX_ANSWER_BYTES // 2 else needed
    return shaping.padding << math.ceil(math.log2(max(needed / shaping.padding, 1)))


@dataclass(slots=True)
class _Queue:
    """What a sample has written and no delta has had yet, at a fixed cadence.

    Attributes:
        entries: one for each token, an `Output`, and for each piece of the parts behind the token that completed it. A
            piece is small, so that a text that was held back does not make a delta larger than others.
    """

    sample: int
    messages: AnswerMessages
    cut: bool
    entries: list[Output | pb.Part] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, output: Output) -> None:
        for at in range(len(output.token_ids)):
            token = output.part(at, at + 1)
            self.entries.append(token)
            self.entries += self._pieces(self.messages.read(token))
        if output.finish is not None:
            end = Output(sample=self.sample, finish=output.finish)
            self.entries += self._pieces(self.messages.read(end))
            self.finish = output.finish

    def message(self, count: int) -> pb.GenerateStreamResponse:
        """With so many entries."""
        tokens, parts = Output(sample=self.sample), list[pb.Part]()
        for entry in self.entries[:count]:
            if isinstance(entry, pb.Part):
                parts.append(entry)
            else:
                tokens.add(entry)
        return self.messages.delta(tokens, joined(parts))

    def taken(self, max_bytes: float) -> pb.GenerateStreamResponse:
        """The message with the first entries, as many as fit but at least one if there are any; they are removed."""
        size = min(len(self.entries), MAX_PART_TOKENS)
        fitting = bisect_right(range(1, size + 1), max_bytes, key=lambda count: self.message(count).ByteSize())
        count = min(max(fitting, 1), size)
        first = self.message(count)
        del self.entries[:count]
        return first

    def _pieces(self, parts: SequenceOf[pb.Part]) -> Iterator[pb.Part]:
        if not self.cut:
            yield from parts
            return
        for part in parts:
            call = part.tool_call if part.HasField("tool_call") else None
            text = part.text or part.reasoning if call is None else call.arguments
            if call is not None and call.name:
                yield pb.Part(tool_call=pb.ToolCallDelta(index=call.index, id=call.id, name=call.name))
            for at in range(0, len(text), _PIECE_CHARACTERS):
                piece = text[at : at + _PIECE_CHARACTERS]
                if call is not None:
                    yield pb.Part(tool_call=pb.ToolCallDelta(index=call.index, arguments=piece))
                elif part.HasField("reasoning"):
                    yield pb.Part(reasoning=piece)
                else:
                    yield pb.Part(text=piece)


async def _relay_at_cadence(
    stream: Stream, writer: Writer, messages: AnswerMessages, shaping: DeltaShaping
) -> list[Finish]:
    """One delta for each sample at each multiple of the cadence from now on, until all have finished and are sent.

    A multiple that passes while the reader does not read is left out.
    """
    loop = asyncio.get_running_loop()
    began, multiple, sent = loop.time(), 0, 0
    queues = [_Queue(sample, messages, bool(shaping.padding)) for sample in range(stream.slots)]
    while True:
        multiple = max(multiple + 1, math.ceil((loop.time() - began) / shaping.cadence))
        await _collect(stream, queues, began + multiple * shaping.cadence)
        for queue in queues:
            await writer.write(queue.taken(shaping.max_delta_bytes))
        sent += 1
        finishes = [queue.finish for queue in queues if queue.finish is not None and not queue.entries]
        if len(finishes) == len(queues) and sent % shaping.rounding == 0:
            return finishes


async def _collect(stream: Stream, queues: SequenceOf[_Queue], until: float) -> None:
    """Adds the stream's outputs to the queues of their samples until a time of the event loop; raises the first error
    of a sample or of the stream.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout_at(until):
            while True:
                for pending in await stream.take():
                    _require_good(pending)
                    queues[pending.sample].add(pending)


def _require_good(pending: Output) -> None:
    """Raises the error of a sample."""
    if pending.finish is not None and pending.finish.error is not None:
        raise pending.finish.error


Request = TypeVar("Request")


class Writer:
    """Async context manager around a call's answer. A message that is not read within `stall_seconds` ends it.

    With `reading`, neither may the client let so long pass until its next message, or the end of its stream.

    Args:
        padding: responses of GenerateStream are filled up to a multiple of so many bytes; 0 fills up none.

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
        if self._padding and isinstance(message, pb.GenerateStreamResponse):
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


def pad(message: pb.GenerateStreamResponse | pb.GenerateResponse, multiple: int) -> None:
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
    for length_bytes in (1, 2, 3, 4):
        size = gap - 1 - length_bytes
        if size >= 0 and max(1, math.ceil(size.bit_length() / 7)) == length_bytes:
            return size
    return None


def _between(start: float, end: float) -> timedelta:
    return timedelta(seconds=max(0.0, end - start))
