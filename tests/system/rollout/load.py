"""The load of a rollout: clients that ask on, each with its next question when its answer is complete."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from draftwood_client import AsyncClient, ChatMessage, DraftwoodError

TENANTS = ("acme", "beta", "gamma")
TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Result:
    """One request, with all its attempts; times are of `time.monotonic`.

    Attributes:
        error: it failed with; empty if it did not.
        cut: it failed after its answer had begun, see `_begun`.
    """

    began: float
    ended: float
    question: str
    text: str = ""
    tokens: int = 0
    steps: int = 0
    error: str = ""
    cut: bool = False


Question = tuple[str, int]
"""Its text, and how many tokens its answer may have."""
Ask = Callable[[str, Question], Awaitable[Result]]
"""Sends a tenant's request."""


@dataclass(slots=True)
class Load:
    """Asks until `least` requests were sent and `last` was set.

    Attributes:
        asks: take turns.
        questions: each tenant asks them again and again.
        pause: seconds after each answer.
        results: in the order of their ends.
    """

    asks: Sequence[Ask]
    questions: Sequence[Question]
    least: int
    pause: float = 0.0
    last: asyncio.Event = field(default_factory=asyncio.Event)
    results: list[Result] = field(default_factory=list)
    _more: asyncio.Event = field(default_factory=asyncio.Event)
    _numbers: count[int] = field(default_factory=count)

    async def run(self, concurrency: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(self._ask_on())

    async def reach(self, results: int) -> None:
        """Returns when so many requests have ended."""
        while len(self.results) < results:
            self._more.clear()
            await self._more.wait()

    async def _ask_on(self) -> None:
        while (number := next(self._numbers)) < self.least or not self.last.is_set():
            self.results.append(await self._ask(number))
            self._more.set()
            await asyncio.sleep(self.pause)

    async def _ask(self, number: int) -> Result:
        tenant = TENANTS[number % len(TENANTS)]
        question = self.questions[number // len(TENANTS) % len(self.questions)]
        return await self.asks[number % len(self.asks)](tenant, question)


def by(client: AsyncClient, *, learn: bool = True) -> Ask:
    """Asks with a client of the service."""

    async def ask(tenant: str, question: Question) -> Result:
        text, max_tokens = question
        began = time.monotonic()
        stream = client.stream(
            [ChatMessage("user", text)],
            tenant=tenant,
            max_tokens=max_tokens,
            temperature=0.0,
            learn=learn,
            timeout=TIMEOUT_SECONDS,
        )
        try:
            answer = await stream.completion()
        except DraftwoodError as error:
            cut = stream.started is not None or _begun(str(error))
            return Result(began, time.monotonic(), text, error=str(error), cut=cut)
        return Result(began, time.monotonic(), text, answer.text, len(answer.token_ids), answer.drafting.steps)

    return ask


def _begun(error: str) -> bool:
    """The connection broke between the headers of the answer and its first event: gRPC repeats nothing after headers.
    It repeats a request without them, whose last error names the connection that could not be made."""
    return "Stream removed" in error


async def ask_all(ask: Ask, questions: Iterable[Question]) -> list[Result]:
    """As every tenant. Raises AssertionError: one failed."""
    results = [await ask(tenant, question) for question in questions for tenant in TENANTS]
    assert [result.error for result in results if result.error] == []
    return results


async def remembered(client: AsyncClient, questions: Sequence[Question], least: float) -> float:
    """The acceptance of answers that nothing is learned from, when it is above `least`, or after a minute.

    Replicas need some time to read what others have learned.
    """
    deadline = time.monotonic() + 60
    while True:
        found = acceptance(await ask_all(by(client, learn=False), questions))
        if found > least or time.monotonic() > deadline:
            return found


def acceptance(results: Sequence[Result]) -> float:
    """Tokens per decoding step over all answers; 0.0 without any."""
    steps = sum(result.steps for result in results)
    return sum(result.tokens for result in results) / steps if steps else 0.0


def different(results: Sequence[Result]) -> int:
    """Answers that are not the first one to the same question."""
    first: dict[str, str] = {}
    return sum(first.setdefault(result.question, result.text) != result.text for result in results if not result.error)
