"""One request's mailbox: what the engine wrote and the reader has not taken yet, merged by sample. For the event loop
only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from model_runner.sequence import Finish, Sequence, StepOutput, TokenLogprobs

MAX_PART_TOKENS = 1024
"""Tokens in one message, however slow its reader: clients refuse messages of several megabytes."""


@dataclass(slots=True)
class Pending:
    """Outputs of one or several steps, as in `StepOutput`, of the request's sequence number `sample`."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    finish: Finish | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    sample: int = 0

    def parts(self) -> Iterator[Pending]:
        """The tokens in runs of at most `MAX_PART_TOKENS`; the finish is on none of them."""
        for start in range(0, len(self.token_ids), MAX_PART_TOKENS):
            part = slice(start, start + MAX_PART_TOKENS)
            yield Pending(
                self.token_ids[part],
                self.texts[part],
                self.drafted[part],
                logprobs=self.logprobs[part],
                sample=self.sample,
            )


class Stream:
    """An admitted request. A reader that is slower than the engine finds larger `Pending`s, not more of them.

    Attributes:
        sequences: what it submitted, a sequence for each sample; empty before that.
        finished: the engine is through with all sequences.
        names: what the engine's link calls the sequences.
        places: how many of the engine's places it holds, one for each sample.
        admitted_at: on the clock of `time.perf_counter`.
    """

    __slots__ = (
        "_closed",
        "_error",
        "_pending",
        "_release",
        "_running",
        "_submit",
        "_waiter",
        "admitted_at",
        "names",
        "places",
        "sequences",
    )

    def __init__(
        self,
        submit: Callable[[Stream, tuple[Sequence, ...]], None],
        release: Callable[[Stream], None],
        places: int = 1,
    ) -> None:
        self._submit = submit
        self._release = release
        self._pending: dict[int, Pending] = {}
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False
        self._running = places
        self.places = places
        self.sequences: tuple[Sequence, ...] = ()
        self.names: list[int] = []
        self.admitted_at = time.perf_counter()

    @property
    def finished(self) -> bool:
        return self._running == 0

    def submit(self, *sequences: Sequence) -> None:
        """Hands the sequences to the engine, as many as there are places; once.

        Raises:
            EngineStoppedError: the engine stopped since the admission.
            Exception: what `fail` was called with meanwhile.
        """
        assert not self.sequences
        assert len(sequences) == self.places
        assert not self._closed
        if self._error is not None:
            raise self._error
        self._submit(self, sequences)
        self.sequences = sequences

    def put(self, output: StepOutput) -> None:
        """Adds what a step wrote."""
        sample = self.sequences.index(output.sequence)
        if (pending := self._pending.get(sample)) is None:
            pending = self._pending[sample] = Pending(sample=sample)
        pending.token_ids += output.token_ids
        pending.texts += output.texts
        pending.drafted += output.drafted
        pending.logprobs += output.logprobs
        if output.finish is not None:
            pending.finish = output.finish
            self._running -= 1
        self._wake()

    def fail(self, error: Exception) -> None:
        """Ends the stream: `take` raises `error`. The first error stays; after the engine's own end it is too late."""
        if self._error is None and not self.finished:
            self._error = error
            self._wake()

    async def take(self) -> Iterable[Pending]:
        """All that came since the last call, sample by sample, waiting for something to come. For one reader.

        Raises:
            Exception: what `fail` was called with.
        """
        if not self._pending and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None:
            raise self._error
        pending, self._pending = self._pending, {}
        return pending.values()

    def close(self) -> None:
        """Gives the places back and cancels the sequences that have not finished; idempotent."""
        if not self._closed:
            self._closed = True
            self._release(self)

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
