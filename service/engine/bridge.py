"""The way between the service's requests and their engine.

Sequences and cancellations go out through the link as they come; what steps write comes back, a message for one or
several of them, into each stream's own mailbox. The engine never waits for a reader, and no reader waits for an engine
that is gone.
Knows sequences and step outputs; nothing of gRPC or of where the engine runs.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from itertools import count
from typing import Any, Protocol

import structlog

from model_runner.errors import EngineStoppedError
from model_runner.sequence import Sequence, SequenceState, StepOutput
from service.engine.link import Add, Answer, Ask, Cancel, Died, Link, Ready, Stepped, Written
from service.engine.stream import Stream
from service.errors import QueueFullError, ShuttingDownError

_log = structlog.get_logger(__name__)


class EngineRunner(Protocol):
    """Where the engine runs: `engine_process.EngineProcess`, or `engine_host.EngineThread`."""

    def start(self, connection: socket.socket) -> None:
        """Starts the engine at the other end of `connection`, which it takes over; returns at once."""

    def join(self, seconds: float) -> bool:
        """Waits for the engine's end after the link was closed, and brings it about where it can. Blocks.

        Returns:
            Whether it ended by itself within `seconds`.
        """

    @property
    def end(self) -> str:
        """How it ended, for a message."""


class EngineBridge:
    """Admits requests to an engine and brings its answers back. All methods are for the event loop that started it.

    Args:
        runner: where the engine runs.
        max_running: how many sequences the engine decodes together; estimates when a place gets free.
        max_waiting: how many more may wait.

    Attributes:
        on_stopped: called when the engine died.
    """

    def __init__(self, runner: EngineRunner, *, max_running: int, max_waiting: int) -> None:
        self.on_stopped: Callable[[], None] = lambda: None
        self._runner = runner
        self._max_running = max_running
        self._max_live = max_running + max_waiting
        self._live: set[Stream] = set()
        self._names = count()
        self._by_name: dict[int, tuple[Stream, Sequence]] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._stopped = False
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._request_seconds = 1.0
        self._link: Link | None = None

    @property
    def live(self) -> int:
        """Places of requests that were admitted and have not ended."""
        return sum(stream.places for stream in self._live)

    @property
    def stopped(self) -> bool:
        """The engine is closed, or died."""
        return self._stopped

    async def start(self) -> Any:
        """Starts the engine, and returns what it says of itself when it stands.

        Raises:
            Exception: whatever making the engine raised.
        """
        loop = asyncio.get_running_loop()
        self._started: asyncio.Future[Any] = loop.create_future()
        ours, theirs = socket.socketpair()
        self._runner.start(theirs)
        _, self._link = await loop.create_connection(lambda: Link(self._receive, self._lost), sock=ours)
        return await self._started

    def admit(self, places: int = 1) -> Stream:
        """Places for one more request, one for each of its samples, held until the stream is closed.

        Raises:
            EngineStoppedError, ShuttingDownError: there will be no more places here.
            QueueFullError: there are not as many places free.
        """
        if self._stopped:
            raise EngineStoppedError("the engine has stopped")
        if self._draining:
            raise ShuttingDownError()
        if self.live + places > self._max_live:
            raise QueueFullError(self._max_live, min(max(self._request_seconds / self._max_running, 0.1), 10.0))
        stream = Stream(self._submit, self._release, places)
        self._live.add(stream)
        self._idle.clear()
        return stream

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Asks the memory desk beside the engine.

        Raises:
            EngineStoppedError: there is nobody to answer.
            Exception: whatever the desk's method raised.
        """
        if self._stopped or self._link is None:
            raise EngineStoppedError("the engine has stopped")
        number = next(self._names)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._link.send(Ask(number, method, arguments))
        try:
            return await answer
        finally:
            del self._answers[number]

    def drain(self) -> None:
        """Admits nobody any more; live requests go on."""
        self._draining = True

    async def wait_idle(self, seconds: float) -> bool:
        """Whether all requests ended within that time."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def fail_live(self, make_error: Callable[[], Exception]) -> None:
        """Ends every live stream and every question with an error of its own."""
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(make_error())
        for stream in tuple(self._live):
            stream.fail(make_error())

    async def close(self, seconds: float = 10.0) -> bool:
        """Ends what is live, closes the link and waits for the engine's end; idempotent.

        Returns:
            Whether the engine ended by itself within `seconds`.
        """
        self._draining = self._stopped = True
        self.fail_live(ShuttingDownError)
        if self._link is not None:
            self._link.close()
        ended = await asyncio.to_thread(self._runner.join, seconds)
        if not ended:
            _log.error("engine does not stop", waited_seconds=seconds)
        return ended

    def _submit(self, stream: Stream, sequences: tuple[Sequence, ...]) -> None:
        if self._stopped or self._link is None:
            raise EngineStoppedError("the engine has stopped")
        named = {next(self._names): sequence for sequence in sequences}
        stream.names = list(named)
        self._by_name |= {name: (stream, sequence) for name, sequence in named.items()}
        self._link.send(Add(named))

    def _release(self, stream: Stream) -> None:
        self._live.discard(stream)
        for name in stream.names:
            del self._by_name[name]
        if stream.names:
            if not stream.finished and self._link is not None:
                self._link.send(Cancel(stream.names))
            self._request_seconds += 0.1 * (time.perf_counter() - stream.admitted_at - self._request_seconds)
        if not self._live:
            self._idle.set()

    def _receive(self, message: Ready | Stepped | Answer | Died) -> None:
        match message:
            case Stepped(outputs):
                for output in outputs:
                    self._deliver(output)
            case Answer(number, value, error):
                answer = self._answers.get(number)
                if answer is not None and not answer.done():
                    answer.set_result(value) if error is None else answer.set_exception(error)
            case Ready(facts):
                if not self._started.done():
                    self._started.set_result(facts)
            case Died(error):
                self._died(error)

    def _deliver(self, written: Written) -> None:
        stream, sequence = self._by_name.get(written.name, (None, None))
        if stream is None or sequence is None:
            return
        sequence.output += written.token_ids
        if written.stats is not None:
            sequence.stats = written.stats
        else:
            sequence.stats.decode_steps += 1
        if written.finish is not None:
            sequence.state = SequenceState.FINISHED
        parts = written.token_ids, written.texts, written.drafted
        stream.put(StepOutput(sequence, *parts, written.finish, written.logprobs))

    def _lost(self) -> None:
        if not self._stopped:
            self._died(EngineStoppedError(self._runner.end))

    def _died(self, error: BaseException) -> None:
        if self._stopped:
            return
        self._stopped = True
        if not self._started.done():
            self._started.set_exception(error)
            return
        _log.error("engine died", live=len(self._live), error=f"{type(error).__name__}: {error}")
        self.fail_live(lambda: EngineStoppedError("the engine has stopped"))
        self.on_stopped()
