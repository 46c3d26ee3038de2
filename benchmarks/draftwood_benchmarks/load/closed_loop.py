"""A closed loop of clients, which measure TTFT and TPOT: each sends its next request when its answer is complete."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field

from draftwood_client import NO_RETRY, AsyncClient, DraftwoodError, GenerateOptions, Prompt

OWN_CONNECTION = {"grpc.use_local_subchannel_pool": 1}
"""Channel option: otherwise gRPC shares one connection among all clients of a process."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request to send."""

    prompt: Prompt
    options: GenerateOptions


@dataclass(slots=True)
class RequestResult:
    """A request as its client measured it; times are of `time.perf_counter`, in seconds.

    Attributes:
        first_at, last_at: arrival of the first and of the last delta with tokens; 0.0 before.
        first_tokens: tokens in the first delta.
        tokens: tokens in all deltas.
        steps: decoding steps of the answer.
        error: the error that the request failed with; None if it succeeded.
    """

    sent_at: float
    first_at: float = 0.0
    last_at: float = 0.0
    first_tokens: int = 0
    tokens: int = 0
    steps: int = 0
    error: DraftwoodError | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token; None if there is none."""
        return self.first_at - self.sent_at if self.tokens else None

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first delta; None if there are no more tokens."""
        later = self.tokens - self.first_tokens
        return (self.last_at - self.first_at) / later if later else None


@dataclass(slots=True)
class Window:
    """The measurements of a window of time.

    Attributes:
        seconds: length of the window.
        tokens: tokens that arrived in the window.
        results: results of the requests sent in the window; their answers may end after it.
        parts: the windows that this one joins; empty if it joins none.
        steps: of a peer: forward passes that wrote the tokens, each sequence's counted.
    """

    seconds: float = 0.0
    tokens: int = 0
    results: list[RequestResult] = field(default_factory=list)
    parts: list[Window] = field(default_factory=list)
    steps: int = 0

    @property
    def tokens_per_s(self) -> float:
        """0.0 if the window is empty."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each joined window."""
        return [window.tokens_per_s for window in self.parts]

    @classmethod
    def joined(cls, windows: Sequence[Window]) -> Window:
        return cls(
            sum(window.seconds for window in windows),
            sum(window.tokens for window in windows),
            [result for window in windows for result in window.results],
            [part for window in windows for part in window.parts or ([window] if window.seconds else [])],
            sum(window.steps for window in windows),
        )


async def closed_loop(target: str, concurrency: int, take: Callable[[], Request | None], seconds: float) -> Window:
    """Runs `concurrency` clients, each on a connection of its own, for `seconds` or until `take` returns None.

    The window ends when the time is over or the first client gets None: from then on fewer clients are busy. Answers
    under way are read to their end, so that slow ones are not left out of the latencies.
    """
    window = Window()
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(AsyncClient(target, retry=NO_RETRY, channel_options=OWN_CONNECTION))
            for _ in range(concurrency)
        ]
        await asyncio.gather(*map(_connect, clients))
        started = time.perf_counter()
        end = started + seconds

        async def work(client: AsyncClient) -> None:
            nonlocal end
            while (now := time.perf_counter()) < end:
                if (request := take()) is None:
                    end = now
                    return
                result = RequestResult(now)
                window.results.append(result)
                await _answer(client, request, result, count)

        def count(tokens: int, now: float) -> None:
            if now < end:
                window.tokens += tokens

        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(work(client))
    window.seconds = end - started
    return window


async def _connect(client: AsyncClient) -> None:
    """Connects: otherwise the first request's TTFT would have that too."""
    with suppress(DraftwoodError):
        await client.model_info()


async def _answer(
    client: AsyncClient, request: Request, result: RequestResult, count: Callable[[int, float], None]
) -> None:
    try:
        async with client.stream(request.prompt, **request.options) as stream:
            async for delta in stream:
                if not delta.token_ids:
                    continue
                result.last_at = time.perf_counter()
                if not result.tokens:
                    result.first_at, result.first_tokens = result.last_at, len(delta.token_ids)
                result.tokens += len(delta.token_ids)
                count(len(delta.token_ids), result.last_at)
            result.steps = (await stream.completion()).drafting.steps
    except DraftwoodError as error:
        result.error = error
