"""A closed loop of clients, which measure TTFT and TPOT: each sends its next request when its answer is complete."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count

from draftwood_benchmarks.harness.report import BenchmarkError
from draftwood_client import NO_RETRY, AsyncClient, ChatMessage, DraftwoodError, GenerateOptions, ModelInfo, Prompt

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


async def closed_loop(target: str, concurrency: int, requests: Iterator[Request], seconds: float) -> Window:
    """Runs `concurrency` clients, each on a connection of its own, for `seconds` or until there are no more requests.

    The window ends when the time is over or the first client gets none: from then on fewer clients are busy. Answers
    under way are read to their end, so that slow ones are not left out of the latencies.
    """
    window = Window()
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(AsyncClient(target, retry=NO_RETRY, channel_options=OWN_CONNECTION))
            for _ in range(concurrency)
        ]
        # They connect: otherwise the first request's TTFT would have that too.
        await asyncio.gather(*(client.model_info() for client in clients), return_exceptions=True)
        started = time.perf_counter()
        end = started + seconds

        async def work(client: AsyncClient) -> None:
            nonlocal end
            while (now := time.perf_counter()) < end:
                if (request := next(requests, None)) is None:
                    end = now
                    return
                result = RequestResult(now)
                window.results.append(result)
                async for tokens in _answer(client, request, result):
                    window.tokens += tokens if result.last_at < end else 0

        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(work(client))
    window.seconds = end - started
    return window


async def _answer(client: AsyncClient, request: Request, result: RequestResult) -> AsyncIterator[int]:
    """Yields how many tokens have arrived, and notes them in the result."""
    try:
        async with client.stream(request.prompt, **request.options) as stream:
            async for delta in stream:
                if not delta.token_ids:
                    continue
                result.last_at = time.perf_counter()
                if not result.tokens:
                    result.first_at, result.first_tokens = result.last_at, len(delta.token_ids)
                result.tokens += len(delta.token_ids)
                yield len(delta.token_ids)
            result.steps = (await stream.completion()).drafting.steps
    except DraftwoodError as error:
        result.error = error


Text = str | Sequence[ChatMessage | Mapping[str, str]]
"""A prompt that is not yet token ids."""
_WARM_UP_CLIENTS = 8
"""Clients that send the warm-up requests; affects the time of the warm-up only."""


class Questions:
    """Hands out requests.

    Args:
        target: the service, for warm-up requests.
        measured: prompts to hand out.
        others: prompts of the warm-up.
        options: options of every request.
    """

    def __init__(
        self, target: str, measured: Sequence[Prompt], others: Sequence[Prompt], options: GenerateOptions
    ) -> None:
        self._target = target
        self._measured = measured
        self._others = others
        self._options = options
        self._tenants = count(1)
        self._drafted: deque[Request] = deque()

    def plain(self) -> Iterator[Request]:
        """Requests without drafting, without end."""
        while True:
            yield from self._of_new_tenant(drafting=False)

    def drafted(self) -> Iterator[Request]:
        """The prepared requests with drafting that have not been handed out."""
        while self._drafted:
            yield self._drafted.popleft()

    async def prepare(self, needed: int) -> None:
        """Warms up tenants until `needed` requests with drafting are prepared.

        Raises:
            BenchmarkError: a request of the warm-up failed.
        """
        while len(self._drafted) < needed:
            requests = self._of_new_tenant(drafting=True)
            learning = (Request(prompt, requests[0].options) for prompt in self._others)
            learned = await closed_loop(self._target, _WARM_UP_CLIENTS, learning, math.inf)
            if failed := [result.error for result in learned.results if result.error is not None]:
                raise BenchmarkError(f"a request of the warm-up failed: {failed[0]}")
            self._drafted.extend(requests)

    def _of_new_tenant(self, *, drafting: bool) -> list[Request]:
        """All measured questions as requests of a new tenant, in random order."""
        number = next(self._tenants)
        options: GenerateOptions = {**self._options, "tenant": f"bench-{number}", "drafting": drafting}
        order = random.Random(number).sample(self._measured, len(self._measured))
        return [Request(prompt, options) for prompt in order]


async def fitting(client: AsyncClient, info: ModelInfo, texts: Sequence[str], max_tokens: int) -> list[Text]:
    """The texts that fit the context with an answer of `max_tokens`; chat messages if the model has a chat template."""
    prompts: list[Text] = []
    for text in texts:
        source: Text = [ChatMessage("user", text)] if info.has_chat_template else text
        if len((await client.tokenize(source)).token_ids) + max_tokens <= info.max_context_tokens:
            prompts.append(source)
    return prompts
