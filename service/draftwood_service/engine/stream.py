"""One request's output stream: outputs that the reader has not taken yet, merged by sample. For the event loop only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from draftwood_model_runner.output import Finish, TokenLogprobs, VerifiedTree
from draftwood_model_runner.request import Request
from draftwood_model_runner.statistics import SequenceStats
from draftwood_service.engine.link import SequenceOutput

MAX_PART_TOKENS = 1024
"""Tokens in one message, however slow the reader is. gRPC clients refuse messages above 4 MiB by default; with 20
log-probabilities a token, 1024 tokens take about 300 KiB."""
MAX_TREES = 64
"""Verified drafts in one message, the last ones. With 512 nodes each they take some 500 KiB."""
PAUSE_SECONDS = 0.25
"""How long an output may wait to be taken until its request gives up its slots: longer than the event loop is
blocked, and short for a request that waits for a slot."""


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

    def record(self, output: SequenceOutput) -> None:
        """Takes note of an output."""
        self.completion_tokens += len(output.token_ids)
        if output.stats is not None:
            self.stats = output.stats
        else:
            self.stats.decode_steps += 1


@dataclass(slots=True)
class Pending:
    """Outputs of one or several steps, as in `StepOutput`, of the request's sample number `sample`."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    finish: Finish | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    sample: int = 0
    trees: list[VerifiedTree] = field(default_factory=list)

    def add(self, later: SequenceOutput | Pending) -> None:
        """Appends later tokens, and their finish."""
        self.token_ids += later.token_ids
        self.texts += later.texts
        self.drafted += later.drafted
        self.logprobs += later.logprobs
        if later.trees:
            self.trees = [*self.trees, *later.trees][-MAX_TREES:]
        self.finish = later.finish

    def part(self, start: int, stop: int | None = None) -> Pending:
        """The tokens from `start` to before `stop`, without the finish."""
        part = slice(start, stop)
        return Pending(
            self.token_ids[part],
            self.texts[part],
            self.drafted[part],
            logprobs=self.logprobs[part],
            sample=self.sample,
        )

    def remove(self, count: int) -> None:
        """Drops the first tokens."""
        for values in (self.token_ids, self.texts, self.drafted, self.logprobs):
            del values[:count]

    def parts(self, with_end: bool = False) -> Iterator[Pending]:
        """The tokens in pieces of at most `MAX_PART_TOKENS`; the last one has the trees.

        Args:
            with_end: the last piece has the finish, and there is one without tokens if there is nothing but a finish.
        """
        alone = with_end and self.finish is not None and not self.token_ids
        for start in range(0, len(self.token_ids) or alone, MAX_PART_TOKENS):
            part = self.part(start, start + MAX_PART_TOKENS)
            if start + MAX_PART_TOKENS >= len(self.token_ids):
                part.trees = self.trees
                part.finish = self.finish if with_end else None
            yield part


class Stream:
    """An admitted request. A reader that is slower than the engine gets larger `Pending`s, not more of them.

    One that stops reading gives up its slots in the engine: it is paused when an output comes while an earlier one has
    waited for `PAUSE_SECONDS`, and resumed when the reader has taken all of them and asks for more.

    Attributes:
        samples: the submitted ones; empty before that.
        finished: all samples have finished.
        ids: of the samples, on the engine's link.
        tenant: of the request.
        slots: number of slots that it holds, one for each sample.
        has_slots: the slots are its own; otherwise `submit` takes them from other requests.
        paused: it has given them up until its reader has caught up.
        admitted_at: on the clock of `time.perf_counter`.
    """

    __slots__ = (
        "_closed",
        "_error",
        "_pending",
        "_pending_since",
        "_release",
        "_running",
        "_set_paused",
        "_submit",
        "_waiter",
        "admitted_at",
        "has_slots",
        "ids",
        "paused",
        "samples",
        "slots",
        "tenant",
    )

    def __init__(
        self,
        submit: Callable[[Stream, tuple[Sample, ...]], None],
        release: Callable[[Stream], None],
        slots: int = 1,
        tenant: str = "",
        set_paused: Callable[[Stream], None] = lambda stream: None,
    ) -> None:
        self._submit = submit
        self._release = release
        self._set_paused = set_paused
        self._pending: dict[int, Pending] = {}
        self._pending_since = 0.0
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False
        self._running = slots
        self.has_slots = False
        self.paused = False
        self.slots = slots
        self.tenant = tenant
        self.samples: tuple[Sample, ...] = ()
        self.ids: list[int] = []
        self.admitted_at = time.perf_counter()

    @property
    def finished(self) -> bool:
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
        self._submit(self, samples)
        self.samples = samples

    def put(self, sample: Sample, output: SequenceOutput) -> None:
        """Adds an output of one of the samples."""
        sample.record(output)
        now = time.perf_counter()
        if not self._pending:
            self._pending_since = now
        number = self.samples.index(sample)
        if (pending := self._pending.get(number)) is None:
            pending = self._pending[number] = Pending(sample=number)
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

    async def take(self) -> Iterable[Pending]:
        """The outputs since the last call, one `Pending` for each sample; waits until there is one. For one reader.

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
        """Releases the slots and cancels the sequences that have not finished; idempotent."""
        if not self._closed:
            self._closed = True
            self._release(self)

    def _pause(self, paused: bool) -> None:
        self.paused = paused
        self._set_paused(self)

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
