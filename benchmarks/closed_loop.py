"""So many clients at once, each asking its next question when its last answer is there; and what they measure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from draftwood_client import NO_RETRY, AsyncClient, DraftwoodError, GenerateOptions, Prompt

OWN_CONNECTION = {"grpc.use_local_subchannel_pool": 1}
"""Channel option: gRPC would share one connection among all clients of a process."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: what to continue or answer, and for whom."""

    prompt: Prompt
    options: GenerateOptions


@dataclass(slots=True)
class Asked:
    """One request as its client saw it; times on the clock of `time.perf_counter`.

    Attributes:
        first_at, last_at: when its first and its last tokens came; 0.0 before.
        first_tokens: how many came first.
        tokens: how many came in all.
        steps: decoding steps of the answer.
        error: what it ended with, where it did not end well.
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
        """Seconds to the first token."""
        return self.first_at - self.sent_at if self.tokens else None

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first ones; None where no more came."""
        later = self.tokens - self.first_tokens
        return (self.last_at - self.first_at) / later if later else None


@dataclass(slots=True)
class Window:
    """What clients saw in a stretch of time.

    Attributes:
        seconds: its length.
        tokens: tokens that came in it.
        asked: the requests that were sent in it, each to its end, which may lie after it.
    """

    seconds: float = 0.0
    tokens: int = 0
    asked: list[Asked] = field(default_factory=list)

    @classmethod
    def joined(cls, windows: Sequence[Window]) -> Window:
        return cls(
            sum(window.seconds for window in windows),
            sum(window.tokens for window in windows),
            [asked for window in windows for asked in window.asked],
        )


async def closed_loop(target: str, concurrency: int, take: Callable[[], Ask | None], seconds: float) -> Window:
    """Runs `concurrency` clients, each on a connection of its own, for `seconds` or until `take` has no more.

    The window ends when the time is over or the first client finds nothing to ask: from there on fewer are at work.
    Answers under way are read to their end, for their latencies to count, whatever they are.
    """
    window = Window()
    started = time.perf_counter()
    end = started + seconds

    async def work() -> None:
        nonlocal end
        async with AsyncClient(target, retry=NO_RETRY, channel_options=OWN_CONNECTION) as client:
            while (now := time.perf_counter()) < end:
                if (ask := take()) is None:
                    end = now
                    return
                asked = Asked(now)
                window.asked.append(asked)
                await _answer(client, ask, asked, count)

    def count(tokens: int, now: float) -> None:
        if now < end:
            window.tokens += tokens

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    window.seconds = end - started
    return window


async def _answer(client: AsyncClient, ask: Ask, asked: Asked, count: Callable[[int, float], None]) -> None:
    try:
        async with client.stream(ask.prompt, **ask.options) as stream:
            async for delta in stream:
                if not delta.token_ids:
                    continue
                asked.last_at = time.perf_counter()
                if not asked.tokens:
                    asked.first_at, asked.first_tokens = asked.last_at, len(delta.token_ids)
                asked.tokens += len(delta.token_ids)
                count(len(delta.token_ids), asked.last_at)
            asked.steps = (await stream.completion()).drafting.steps
    except DraftwoodError as error:
        asked.error = error
