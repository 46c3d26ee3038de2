"""Server-sent events as an HTTP answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


class Events(StreamingResponse):
    """A stream of events.

    Args:
        events: (event name or "", data).
        ended: awaited once the answer has ended, or its client has left, however far it came.
        headers: more of them.
    """

    def __init__(
        self,
        events: AsyncIterator[tuple[str, str]],
        ended: Callable[[], Awaitable[None]],
        headers: Mapping[str, str],
    ) -> None:
        more = {"cache-control": "no-cache", "x-accel-buffering": "no", **headers}
        super().__init__(_bytes(events), media_type="text/event-stream", headers=more)
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._ended()


async def _bytes(events: AsyncIterator[tuple[str, str]]) -> AsyncIterator[bytes]:
    async for event, data in events:
        yield (f"event: {event}\n" if event else "").encode() + b"data: " + data.encode() + b"\n\n"
