"""Sends the tokens of an answer: as they come, or at a fixed cadence."""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import suppress

from draftwood.v1 import generation_pb2 as pb
from draftwood_model_runner.output import Finish
from draftwood_service.engine.output import MAX_PART_TOKENS, Output
from draftwood_service.engine.stream import Stream
from draftwood_service.rpc.streaming.writer import Writer
from draftwood_tenants.shaping import DeltaShaping

DeltaMessage = Callable[[Output], pb.GenerateResponse]
"""The message with the tokens of one or several steps."""


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
    """Adds the stream's outputs to the queues of their samples until a time of the event loop; raises the first error
    of a sample or of the stream.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout_at(until):
            while True:
                for pending in await stream.take():
                    if pending.finish is not None and pending.finish.error is not None:
                        raise pending.finish.error
                    queues[pending.sample].add(pending)


def _next_delta(queue: Output, message: DeltaMessage, max_bytes: float) -> pb.GenerateResponse:
    """The message with the queue's first tokens, as many as fit but at least one if there are any; they leave it."""
    most = min(len(queue.token_ids), MAX_PART_TOKENS)
    fitting = bisect_right(range(1, most + 1), max_bytes, key=lambda count: message(queue.part(0, count)).ByteSize())
    count = min(max(fitting, 1), most)
    first = message(queue.part(0, count))
    queue.remove(count)
    return first
