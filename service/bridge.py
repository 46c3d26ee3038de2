"""The engine's thread, and the way between it and asyncio.

Sequences and cancellations go in through one queue; what a step wrote comes back in one callback a step, into each
stream's own mailbox. The engine never waits for a reader, and no reader waits for an engine that is gone.
Knows sequences and step outputs; nothing of messages or gRPC.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from model_runner.errors import EngineStoppedError
from model_runner.sequence import Finish, FinishReason, Sequence, StepOutput
from service.errors import QueueFullError, ShuttingDownError
from service.stream import Stream

_log = structlog.get_logger(__name__)


class StepEngine(Protocol):
    """`model_runner.engine.Engine`, as its thread drives it. All calls come from that one thread."""

    @property
    def has_work(self) -> bool: ...
    def add(self, sequence: Sequence) -> None: ...
    def cancel(self, sequence: Sequence) -> None: ...
    def step(self) -> list[StepOutput]: ...
    def close(self) -> None: ...


_Command = Callable[[StepEngine], None]


class EngineBridge:
    """Runs an engine on a thread of its own. All methods are for the event loop that started it.

    Args:
        make_engine: called once, on the engine's thread.
        max_running: how many sequences the engine decodes together; estimates when a place gets free.
        max_waiting: how many more may wait.
        on_stopped: called when the engine died.
    """

    def __init__(
        self,
        make_engine: Callable[[], StepEngine],
        *,
        max_running: int,
        max_waiting: int,
        on_stopped: Callable[[], None] = lambda: None,
    ) -> None:
        self._make_engine = make_engine
        self._max_running = max_running
        self._max_live = max_running + max_waiting
        self._on_stopped = on_stopped
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._live: set[Stream] = set()
        self._by_sequence: dict[Sequence, Stream] = {}
        self._stopped = False
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._request_seconds = 1.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def live(self) -> int:
        """Places of requests that were admitted and have not ended."""
        return sum(stream.places for stream in self._live)

    @property
    def stopped(self) -> bool:
        """The engine is closed, or died."""
        return self._stopped

    async def start(self) -> None:
        """Starts the thread, and returns when the engine stands.

        Raises:
            Exception: whatever `make_engine` raised.
        """
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._thread.start()
        await self._started

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

    def run(self, task: Callable[[], None]) -> None:
        """Runs `task`, which must not raise, on the engine's thread between two steps. From any thread.

        Raises:
            EngineStoppedError: the engine has stopped.
        """
        if self._stopped:
            raise EngineStoppedError("the engine has stopped")
        self._commands.put(lambda engine: task())

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
        """Ends every live stream with an error of its own."""
        for stream in tuple(self._live):
            stream.fail(make_error())

    async def close(self, seconds: float = 10.0) -> bool:
        """Ends what is live, closes the engine and waits for its thread; idempotent.

        Returns:
            Whether the thread ended within `seconds`; one that hangs in a step dies with the process.
        """
        self._draining = self._stopped = True
        self.fail_live(ShuttingDownError)
        self._commands.put(None)
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, seconds)
        if alive := self._thread.is_alive():
            _log.error("engine does not stop", waited_seconds=seconds)
        return not alive

    def _submit(self, stream: Stream, sequences: tuple[Sequence, ...]) -> None:
        if self._stopped:
            raise EngineStoppedError("the engine has stopped")
        self._by_sequence |= dict.fromkeys(sequences, stream)
        self._commands.put(lambda engine: self._add(engine, sequences))

    def _release(self, stream: Stream) -> None:
        self._live.discard(stream)
        sequences = stream.sequences
        if sequences:
            for sequence in sequences:
                del self._by_sequence[sequence]
            if not stream.finished:
                self._commands.put(lambda engine: _cancel(engine, sequences))
            self._request_seconds += 0.1 * (time.perf_counter() - stream.admitted_at - self._request_seconds)
        if not self._live:
            self._idle.set()

    def _deliver(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            stream = self._by_sequence.get(output.sequence)
            if stream is not None:
                stream.put(output)

    def _died(self, error: BaseException) -> None:
        self._stopped = True
        if not self._started.done():
            self._started.set_exception(error)
            return
        _log.error("engine died", live=len(self._live), exc_info=error)
        self.fail_live(lambda: EngineStoppedError("the engine has stopped"))
        self._on_stopped()

    # What follows runs on the engine's thread.

    def _run(self) -> None:
        try:
            engine = self._make_engine()
        except BaseException as error:
            self._call(self._died, error)
            return
        self._call(self._set_started)
        try:
            self._serve(engine)
        except BaseException as error:
            self._call(self._died, error)
        finally:
            try:
                engine.close()
            except Exception:
                _log.exception("engine could not be closed")

    def _serve(self, engine: StepEngine) -> None:
        while self._obey(engine):
            if engine.has_work and (outputs := engine.step()):
                self._call(self._deliver, outputs)

    def _obey(self, engine: StepEngine) -> bool:
        """Runs the commands that wait, and waits for one where the engine has no work; False ends the thread."""
        while True:
            try:
                command = self._commands.get(block=not engine.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            command(engine)

    def _add(self, engine: StepEngine, sequences: tuple[Sequence, ...]) -> None:
        for sequence in sequences:
            try:
                engine.add(sequence)
            except Exception as error:
                self._call(self._deliver, [StepOutput(sequence, [], [], [], Finish(FinishReason.ERROR, error=error))])

    def _set_started(self) -> None:
        if not self._started.done():
            self._started.set_result(None)

    def _call(self, callback: Callable[..., None], *args: object) -> None:
        """Runs a callback on the event loop; where the loop is gone, nobody listens and the thread may end."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            self._commands.put(None)


def _cancel(engine: StepEngine, sequences: tuple[Sequence, ...]) -> None:
    for sequence in sequences:
        engine.cancel(sequence)
