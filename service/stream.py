"""One request's mailbox: what the engine wrote and the reader has not taken yet, merged. For the event loop only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from model_runner.sequence import Finish, Sequence, StepOutput, TokenLogprobs

MAX_PART_TOKENS = 1024
"""Tokens in one message, however slow its reader: clients refuse messages of several megabytes."""


@dataclass(slots=True)
class Pending:
    """Outputs of one or several steps, as in `StepOutput`."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    finish: Finish | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def parts(self) -> Iterator[Pending]:
        """The tokens in runs of at most `MAX_PART_TOKENS`; the finish is on none of them."""
        for start in range(0, len(self.token_ids), MAX_PART_TOKENS):
            part = slice(start, start + MAX_PART_TOKENS)
            yield Pending(self.token_ids[part], self.texts[part], self.drafted[part], logprobs=self.logprobs[part])


class Stream:
    """An admitted request. A reader that is slower than the engine finds larger `Pending`s, not more of them.

    Attributes:
        sequence: what it submitted; None before that.
        finished: the engine is through with the sequence.
        admitted_at: on the clock of `time.perf_counter`.
    """

    __slots__ = (
        "_closed",
        "_error",
        "_pending",
        "_release",
        "_submit",
        "_waiter",
        "admitted_at",
        "finished",
        "sequence",
    )

    def __init__(self, submit: Callable[[Stream, Sequence], None], release: Callable[[Stream], None]) -> None:
        self._submit = submit
        self._release = release
        self._pending: Pending | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False
        self.sequence: Sequence | None = None
        self.finished = False
        self.admitted_at = time.perf_counter()

    def submit(self, sequence: Sequence) -> None:
        """Hands the sequence to the engine; once.

        Raises:
            EngineStoppedError: the engine stopped since the admission.
            Exception: what `fail` was called with meanwhile.
        """
        assert self.sequence is None
        assert not self._closed
        if self._error is not None:
            raise self._error
        self._submit(self, sequence)
        self.sequence = sequence

    def put(self, output: StepOutput) -> None:
        """Adds what a step wrote."""
        if self._pending is None:
            self._pending = Pending()
        pending = self._pending
        pending.token_ids += output.token_ids
        pending.texts += output.texts
        pending.drafted += output.drafted
        pending.logprobs += output.logprobs
        if output.finish is not None:
            pending.finish = output.finish
            self.finished = True
        self._wake()

    def fail(self, error: Exception) -> None:
        """Ends the stream: `take` raises `error`. The first error stays; after the engine's own end it is too late."""
        if self._error is None and not self.finished:
            self._error = error
            self._wake()

    async def take(self) -> Pending:
        """All that came since the last call, waiting for something to come. For one reader.

        Raises:
            Exception: what `fail` was called with.
        """
        if self._pending is None and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None:
            raise self._error
        assert self._pending is not None
        pending, self._pending = self._pending, None
        return pending

    def close(self) -> None:
        """Gives the place back and cancels the sequence where it has not finished; idempotent."""
        if not self._closed:
            self._closed = True
            self._release(self)

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
