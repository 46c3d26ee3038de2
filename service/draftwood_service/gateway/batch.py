"""The prompts of one request: a few of them run at once, and one that fails ends the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from draftwood_client import AsyncGenerationStream, Completion, Delta

_AHEAD = 16
"""Deltas that wait for a client that reads slowly."""

_T = TypeVar("_T")


class Batch:
    """The answers to several prompts, in a single use: `begin`, then `completions`, or `events` and `close`.

    Args:
        open_stream: of the prompt with this number; nothing is sent before it is entered.
        prompts: how many.
        at_once: how many of them run at once.
    """

    def __init__(self, open_stream: Callable[[int], AsyncGenerationStream], prompts: int, at_once: int) -> None:
        self._open = open_stream
        self._prompts = prompts
        self._at_once = min(at_once, prompts)
        self._streams: list[AsyncGenerationStream] = []
        self._next = iter(range(self._at_once, prompts))
        self._workers: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        """Sends the first prompts, and returns once the service has admitted them. Raises the first error."""
        self._streams = [self._open(number) for number in range(self._at_once)]
        try:
            await _all(stream.__aenter__() for stream in self._streams)
        except BaseException:
            await self.close()
            raise

    async def completions(self) -> Sequence[Completion]:
        """All answers. Raises the first error, which ends the others."""
        whole: dict[int, Completion] = {}
        try:
            async for number, event in self.events():
                if isinstance(event, Completion):
                    whole[number] = event
        finally:
            await self.close()
        return [whole[number] for number in sorted(whole)]

    async def events(self) -> AsyncIterator[tuple[int, Delta | Completion]]:
        """The number of a prompt, and what came of it: deltas, then the whole. Raises the first error."""
        if self._prompts == 1:
            async for delta in self._streams[0]:
                yield 0, delta
            yield 0, await self._streams[0].completion()
            return
        events: asyncio.Queue[tuple[int, Delta | Completion] | Exception] = asyncio.Queue(_AHEAD)
        self._workers = [asyncio.create_task(self._work(number, events)) for number in range(self._at_once)]
        left = self._prompts
        while left:
            event = await events.get()
            if isinstance(event, Exception):
                raise event
            left -= isinstance(event[1], Completion)
            yield event

    async def close(self) -> None:
        """Cancels what runs."""
        for worker in self._workers:
            worker.cancel()
        for stream in self._streams:
            stream.cancel()
        if self._workers:
            await asyncio.wait(self._workers)

    async def _work(self, number: int, events: asyncio.Queue[tuple[int, Delta | Completion] | Exception]) -> None:
        """Reads the stream of a prompt, then those of prompts that no worker has begun."""
        stream = self._streams[number]
        try:
            while True:
                async for delta in stream:
                    await events.put((number, delta))
                await events.put((number, await stream.completion()))
                if (following := next(self._next, None)) is None:
                    return
                number, stream = following, self._open(following)
                self._streams.append(stream)
        except Exception as error:
            await events.put(error)


async def _all(work: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """The results. The first error cancels the others, and is raised."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        del task, tasks  # an error would hold itself by them and its traceback, and the request with it
