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
        most: of them at once.
    """

    def __init__(self, open_stream: Callable[[int], AsyncGenerationStream], prompts: int, most: int) -> None:
        self._open = open_stream
        self._prompts = prompts
        self._most = min(most, prompts)
        self._streams: list[AsyncGenerationStream] = []
        self._next = iter(range(self._most, prompts))
        self._workers: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        """Sends the first prompts, and returns once the service has admitted them. Raises the first error."""
        self._streams = [self._open(number) for number in range(self._most)]
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
        found: asyncio.Queue[tuple[int, Delta | Completion] | Exception] = asyncio.Queue(_AHEAD)
        self._workers = [asyncio.create_task(self._work(number, found)) for number in range(self._most)]
        left = self._prompts
        while left:
            event = await found.get()
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

    async def _work(self, number: int, found: asyncio.Queue[tuple[int, Delta | Completion] | Exception]) -> None:
        """Reads the stream of a prompt, then those of prompts that no worker has begun."""
        stream = self._streams[number]
        try:
            while True:
                async for delta in stream:
                    await found.put((number, delta))
                await found.put((number, await stream.completion()))
                if (following := next(self._next, None)) is None:
                    return
                number, stream = following, self._open(following)
                self._streams.append(stream)
        except Exception as error:
            await found.put(error)


async def _all(work: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """The results. The first error cancels the others, and is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        del task, tasks  # an error would hold itself by them and its traceback, and the request with it
