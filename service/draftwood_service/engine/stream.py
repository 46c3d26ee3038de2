"""One request's output stream: outputs that the reader has not taken yet, merged by sample. For the event loop only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from draftwood_model_runner.output import Finish, TokenLogprobs, VerifiedTree
from draftwood_model_runner.request import Request
from draftwood_model_runner.sequence import SequenceStats

PAUSE_SECONDS = 0.25
"""Seconds that an output may stay unread until its request is paused and its slots are freed: longer than the event
loop is blocked, and short for a request that waits for a slot."""
MAX_PART_TOKENS = 1024
"""Tokens in one message, however slow the reader is. gRPC clients refuse messages above 4 MiB by default; with 20
log-probabilities a token, 1024 tokens take about 300 KiB."""
MAX_TREES = 64
"""Verified drafts in one message, the last ones. With 512 nodes each they take some 500 KiB."""


@dataclass(eq=False, slots=True)
class Sample:
    """One sample of a request, as the service sees it.

    Attributes:
        completion_tokens: written so far.
        stats: as of the first output or the last; until the last, `decode_steps` counts the outputs since.
    """

    request: Request
    completion_tokens: int = 0
    stats: SequenceStats = field(default_factory=SequenceStats)

    def __post_init__(self) -> None:
        self.stats.arrived_at = self.request.arrived_at

    def record(self, output: Output) -> None:
        """Takes note of an output."""
        self.completion_tokens += len(output.token_ids)
        if output.stats is not None:
            self.stats = output.stats
        else:
            self.stats.decode_steps += 1


@dataclass(eq=False, slots=True)
class Stream:
    """An admitted request. A reader that is slower than the engine gets larger `Output`s, not more of them.

    A request whose reader stops is paused and frees its slots: when an output comes while an earlier one has waited
    for `PAUSE_SECONDS`, and resumed when the reader has taken all of them and asks for more.

    Attributes:
        on_submit: sends the samples to the engine; raises if it cannot.
        on_close: called once, at `close`.
        on_pause: called when `paused` changes.
        slots: number of slots that it holds, one for each sample.
        tenant: of the request.
        request_id: of the request, by which its tenant may abort it.
        samples: the submitted ones; empty before that.
        id: on the engine's link; None until it is submitted.
        has_slots: the slots are its own; otherwise `submit` takes them from other requests.
        paused: it has freed them until its reader has caught up.
        admitted_at: on the clock of `time.perf_counter`.
    """

    on_submit: Callable[[Stream], None]
    on_close: Callable[[Stream], None]
    slots: int = 1
    tenant: str = ""
    on_pause: Callable[[Stream], None] = lambda stream: None
    request_id: str = ""
    samples: tuple[Sample, ...] = ()
    id: int | None = None
    has_slots: bool = False
    paused: bool = False
    admitted_at: float = field(default_factory=time.perf_counter)
    _running: int = field(init=False)
    _pending: dict[int, Output] = field(default_factory=dict, init=False)
    _pending_since: float = field(default=0.0, init=False)
    _error: Exception | None = field(default=None, init=False)
    _waiter: asyncio.Future[None] | None = field(default=None, init=False)
    _closed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._running = self.slots

    @property
    def finished(self) -> bool:
        """All samples have finished."""
        return self._running == 0

    @property
    def failed(self) -> bool:
        """It was ended by `fail`, so that it needs no slots any more."""
        return self._error is not None

    @property
    def begun(self) -> bool:
        """Some of the answer was written."""
        return any(sample.completion_tokens for sample in self.samples)

    def submit(self, *samples: Sample) -> None:
        """Sends the samples to the engine, as many as there are slots; once.

        Raises:
            EngineStoppedError: the engine has stopped since the admission.
            QueueFullError: it has no slots, and no other request gives them up any more.
            Exception: the error of `fail`.
        """
        assert not self.samples
        assert len(samples) == self.slots
        assert not self._closed
        if self._error is not None:
            raise self._error
        self.samples = samples
        self.on_submit(self)

    def put(self, output: Output) -> None:
        """Adds an output of one of the samples."""
        self.samples[output.sample].record(output)
        now = time.perf_counter()
        if not self._pending:
            self._pending_since = now
        if (pending := self._pending.get(output.sample)) is None:
            self._pending[output.sample] = output
        else:
            pending.add(output)
        if output.finish is not None:
            self._running -= 1
        if not self.paused and not self.finished and now - self._pending_since > PAUSE_SECONDS:
            self._pause(True)
        self._wake()

    def unread_for(self) -> float:
        """Seconds for which the oldest output that was not taken has waited; 0 if there is none."""
        return time.perf_counter() - self._pending_since if self._pending else 0.0

    def fail(self, error: Exception) -> None:
        """Ends the stream: `take` raises `error`. Only the first error counts, and none while the last outputs of all
        samples wait to be taken: afterwards a reader may still have a part of the answer to send.
        """
        if self._error is None and not (self.finished and self._pending):
            self._error = error
            self._wake()

    async def take(self) -> Iterable[Output]:
        """The outputs since the last call, one `Output` for each sample; waits until there is one. For one reader.

        Raises:
            Exception: the error of `fail`.
        """
        if not self._pending and self._error is None:
            if self.paused:
                self._pause(False)
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None:
            raise self._error
        pending, self._pending = self._pending, {}
        return pending.values()

    def close(self) -> None:
        """Releases the slots and cancels the samples that have not finished; idempotent."""
        if not self._closed:
            self._closed = True
            self.on_close(self)

    def _pause(self, paused: bool) -> None:
        self.paused = paused
        self.on_pause(self)

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


@dataclass(slots=True)
class Output:
    """What one or several steps wrote, as in `StepOutput`.

    Attributes:
        request: its id on the link.
        sample: number of the sample among those of the request.
        stats: of the sample, with its first output and its last.
    """

    request: int = 0
    sample: int = 0
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    finish: Finish | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    trees: list[VerifiedTree] = field(default_factory=list)
    stats: SequenceStats | None = None

    def __reduce__(self) -> tuple[type[Output], tuple[Any, ...]]:
        """In half the time, and without names of fields: each step sends one for each sample."""
        fields = self.request, self.sample, self.token_ids, self.texts, self.drafted
        return Output, (*fields, self.finish, self.logprobs, self.trees, self.stats)

    def add(self, later: Output) -> None:
        """Appends later tokens of the sample, and its finish."""
        self.token_ids += later.token_ids
        self.texts += later.texts
        self.drafted += later.drafted
        self.logprobs += later.logprobs
        if later.trees:
            self.trees = [*self.trees, *later.trees][-MAX_TREES:]
        self.finish = later.finish

    def part(self, start: int, stop: int | None = None) -> Output:
        """The tokens from `start` to before `stop`, without the finish."""
        part = slice(start, stop)
        return Output(
            self.request,
            self.sample,
            self.token_ids[part],
            self.texts[part],
            self.drafted[part],
            logprobs=self.logprobs[part],
        )

    def parts(self) -> Iterator[Output]:
        """The tokens in pieces of at most `MAX_PART_TOKENS`. The last one has the trees and the finish; if there is
        nothing but a finish, it is without tokens.
        """
        alone = self.finish is not None and not self.token_ids
        for start in range(0, len(self.token_ids) or alone, MAX_PART_TOKENS):
            part = self.part(start, start + MAX_PART_TOKENS)
            if start + MAX_PART_TOKENS >= len(self.token_ids):
                part.trees = self.trees
                part.finish = self.finish
            yield part
