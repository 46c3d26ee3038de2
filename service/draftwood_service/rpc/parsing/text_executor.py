"""Runs tokenization or grammar checks off the event loop: few at once, one of a tenant, and few waiting."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from draftwood_service.errors import TooMuchTextError

P = ParamSpec("P")
T = TypeVar("T")

_THREADS = 2
"""The libraries compute without the interpreter's lock, so that more would take CPU time from the model."""
_WAITING, _WAITING_OF_TENANT = 64, 16
"""Calls that run or wait: of all tenants, and of one."""


class TextExecutor:
    """The threads. Used from one event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="text")
        self._pending: Counter[str] = Counter()
        self._one_at_a_time: dict[str, asyncio.Semaphore] = {}

    async def run(self, tenant: str, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` returns, computed in a thread.

        A call that is cancelled while its work runs counts as pending until that ends. Calls of a tenant run one after
        the other, so that a slow one delays those of others by no more than one.

        Raises:
            TooMuchTextError: the tenant, or all together, have too many pending calls.
        """
        if self._pending[tenant] >= _WAITING_OF_TENANT or self._pending.total() >= _WAITING:
            raise TooMuchTextError(self._pending[tenant])
        self._pending[tenant] += 1
        try:
            await self._one_at_a_time.setdefault(tenant, asyncio.Semaphore(1)).acquire()
        except BaseException:
            self._left(tenant)
            raise
        future = self._threads.submit(work, *args, **kwargs)
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._ended, tenant))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Lets running work end, and starts no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ended(self, tenant: str) -> None:
        self._one_at_a_time[tenant].release()
        self._left(tenant)

    def _left(self, tenant: str) -> None:
        self._pending[tenant] -= 1
        if not self._pending[tenant]:
            del self._pending[tenant], self._one_at_a_time[tenant]
