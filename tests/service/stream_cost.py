"""CPU cost of a streamed message in the service: `python -m tests.service.stream_cost [--streams N] [--step-ms MS]`.

A fake engine writes a step every few milliseconds; a client in another process reads. Prints the CPU time of the
serving process a message, less what the fake engine's own thread took.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import time
from multiprocessing.synchronize import Barrier

import grpc
import uvloop

from draftwood.v1 import generation_pb2 as pb
from draftwood.v1 import generation_pb2_grpc as pb_grpc
from draftwood_model_runner.output import StepOutput
from tests.service.fakes import FakeEngine, FakeModel, serving


class MeteredEngine(FakeEngine):
    """Measures its own CPU time."""

    def __init__(self, max_running: int, step_seconds: float) -> None:
        super().__init__(max_running)
        self.step_seconds = step_seconds
        self.cpu_seconds = 0.0

    def step(self) -> list[StepOutput]:
        started = time.thread_time()
        outputs = super().step()
        self.cpu_seconds += time.thread_time() - started
        return outputs


def read_streams(address: str, streams: int, tokens: int, barrier: Barrier) -> None:
    """The client's process."""

    async def read_one(stub: pb_grpc.GenerationServiceAsyncStub) -> None:
        request = pb.GenerateRequest(text="x" * 100, stop=pb.StopOptions(max_tokens=tokens))
        async for _ in stub.GenerateStream(request):
            pass

    async def read_all() -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = pb_grpc.GenerationServiceStub(channel)
            await asyncio.gather(*(read_one(stub) for _ in range(streams)))

    barrier.wait()
    uvloop.run(read_all())
    barrier.wait()


async def measure(streams: int, steps: int, step_seconds: float) -> str:
    engine = MeteredEngine(streams, step_seconds)
    tokens = steps * engine.tokens_per_step
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    model = FakeModel(max_context=2 * tokens)
    async with serving(engine, model, max_running=streams, log_level="error") as served:
        arguments = (served.server.address, streams, tokens, barrier)
        client = context.Process(target=read_streams, args=arguments, daemon=True)
        client.start()
        await asyncio.to_thread(barrier.wait)
        before, wall = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        engine_before = engine.cpu_seconds
        await asyncio.to_thread(barrier.wait)
        after, wall = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter() - wall
        await asyncio.to_thread(client.join)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    ours = cpu - (engine.cpu_seconds - engine_before)
    messages = streams * steps
    return (
        f"{streams:3} streams, {1000 * step_seconds:g} ms a step: {1e6 * ours / messages:6.1f} us CPU a message,"
        f" {1e6 * ours / engine.steps:6.1f} us a step, {messages / wall:7.0f} messages/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--step-ms", type=float, default=5.0)
    options = parser.parse_args()
    for streams in options.streams:
        print(uvloop.run(measure(streams, options.steps, options.step_ms / 1000)), flush=True)


if __name__ == "__main__":
    main()
