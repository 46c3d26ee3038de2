"""Between the service's requests and their engine.

Requests and cancellations are sent through the link at once; step outputs come back, one or several steps a message,
and are queued in each request's stream. The engine never waits for a reader, and no reader waits for an engine that has
ended. Contains nothing of gRPC, or of where the engine runs.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeVar

import structlog

from draftwood_memory.memory import MemoryOperation
from draftwood_model_runner.errors import EngineStoppedError
from draftwood_service.engine.admission import Admission
from draftwood_service.engine.audits import AuditResult
from draftwood_service.engine.link import (
    Add,
    Control,
    Died,
    FromEngine,
    Link,
    MemoryRequest,
    MemoryResponse,
    Ready,
    TokenizerFound,
)
from draftwood_service.engine.process import EngineRunner
from draftwood_service.engine.reports import EngineReport, ReportHistory
from draftwood_service.engine.stream import Stream
from draftwood_service.errors import AbortedError, ShuttingDownError

_log = structlog.get_logger(__name__)

_JOIN_SECONDS = 5.0
"""For an engine that has died to end before another one is started."""

Result = TypeVar("Result")


class EngineBridge:
    """Admits requests to an engine and delivers its outputs. All methods are for the event loop that started it.

    Args:
        runner: where the engine runs.
        max_running: sequences that the engine decodes together.
        max_waiting: further sequences that are admitted.

    Attributes:
        weight_of: the share of a tenant in these, relative to others.
        on_stopped: called when the engine has died; `restart` starts another.
        on_audited: called with the result of each audit.
        on_tokenizer: called with the class of the model's tokenizer, whenever the engine loads the model.
        reports: of the engine, one a second.
        stopped: the engine was closed, or has died and was not restarted yet.
        draining: no request is admitted any more, since the service stops.
    """

    def __init__(self, runner: EngineRunner, *, max_running: int, max_waiting: int) -> None:
        self.on_stopped: Callable[[], None] = lambda: None
        self.weight_of: Callable[[str], float] = lambda tenant: 1.0
        self.on_audited: Callable[[AuditResult], None] = lambda result: None
        self.on_tokenizer: Callable[[str], None] = lambda class_path: None
        self.reports = ReportHistory()
        self._runner = runner
        self._admission = Admission(max_running, max_waiting, lambda tenant: self.weight_of(tenant))
        self._ids = count()
        self._streams: dict[int, Stream] = {}
        self._memory_calls: dict[int, asyncio.Future[Any]] = {}
        self._started_with: Any = None
        self.stopped = False
        self.draining = False
        self._other_calls = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._link: Link | None = None

    @property
    def live(self) -> int:
        """Slots of requests that were admitted and have not ended."""
        return self._admission.taken

    async def start(self, connection: socket.socket | None = None) -> Any:
        """Starts the engine, and returns its `Ready.info` once it is loaded.

        Args:
            connection: to the engine, if the runner has started it already.

        Raises:
            Exception: the error that kept the engine from being loaded.
        """
        loop = asyncio.get_running_loop()
        self._started: asyncio.Future[Any] = loop.create_future()
        if connection is None:
            connection, theirs = socket.socketpair()
            self._runner.start(theirs)
        _, self._link = await loop.create_connection(lambda: Link(self._receive, self._lost), sock=connection)
        info = await self._started
        self.reports.at = time.monotonic()
        if not self.stopped:
            self._started_with = info
        return info

    async def restart(self) -> None:
        """Restarts the engine after it died. Requests are admitted again when it is loaded.

        Raises:
            ShuttingDownError: the bridge drains or was closed.
            EngineStoppedError: the model is not the one that was served before.
            Exception: the error that kept the engine from being loaded.
        """
        if self._link is not None:
            self._link.close()
        await asyncio.to_thread(self._runner.join, _JOIN_SECONDS)
        if self.draining:
            raise ShuttingDownError()
        self.reports.restarted()
        if await self.start() != self._started_with:
            raise EngineStoppedError("another model was loaded")
        self.stopped = False

    def admit(self, slots: int = 1, tenant: str = "", request_id: str = "") -> Stream:
        """Reserves slots for one more request, one for each of its samples, until the stream is closed.

        Others may have to end for it: when it is submitted, not before, since until then it may turn out to be invalid,
        or above a limit.

        Raises:
            EngineStoppedError, ShuttingDownError: no request is admitted any more.
            QueueFullError: fewer slots are free.
        """
        if self.stopped:
            raise EngineStoppedError("the engine has stopped")
        if self.draining:
            raise ShuttingDownError()
        stream = Stream(self._submit, self._release, slots, tenant, self._pause, request_id=request_id)
        self._admission.enter(stream)
        self._idle.clear()
        return stream

    def abort(self, tenant: str, request_ids: Collection[str]) -> None:
        """Ends the tenant's live requests that have one of these ids with AbortedError."""
        for stream in tuple(self._admission.live):
            if stream.tenant == tenant and stream.request_id in request_ids:
                stream.fail(AbortedError())

    async def run_operation(self, operation: MemoryOperation[Result]) -> Result:
        """Runs an operation on the memories in the engine's process. Cancelling the call does not stop the operation.

        Raises:
            EngineStoppedError: the engine has stopped.
            Exception: the operation's error.
        """
        if self.stopped or self._link is None:
            raise EngineStoppedError("the engine has stopped")
        call_id = next(self._ids)
        call: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._memory_calls[call_id] = call
        self._link.send(MemoryRequest(call_id, operation))
        try:
            return await call
        finally:
            del self._memory_calls[call_id]

    @contextmanager
    def other_call(self) -> Iterator[None]:
        """Counts a call that is no request as live: for `wait_idle`.

        Raises:
            ShuttingDownError: the service drains.
        """
        if self.draining:
            raise ShuttingDownError()
        self._other_calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._other_calls -= 1
            self._note_idle()

    def drain(self, seconds: float) -> None:
        """Admits no further request, and refuses those that would not end within `seconds`."""
        self.draining = True
        self._admission.drain(seconds)

    async def wait_idle(self, seconds: float) -> bool:
        """Waits until no request or other call is live; returns whether that happened within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def fail_live(self, make_error: Callable[[], Exception]) -> None:
        """Ends every live stream and every call of `run_operation` with an error of its own."""
        for call in self._memory_calls.values():
            if not call.done():
                call.set_exception(make_error())
        for stream in tuple(self._admission.live):
            stream.fail(make_error())

    async def close(self, seconds: float = 10.0) -> bool:
        """Ends what is live, closes the link and waits until the engine has ended; idempotent.

        Returns:
            Whether the engine ended by itself within `seconds`.
        """
        self.draining = self.stopped = True
        self.fail_live(ShuttingDownError)
        if self._link is not None:
            self._link.close()
        ended = await asyncio.to_thread(self._runner.join, seconds)
        if not ended:
            _log.error("engine does not stop", waited_seconds=seconds)
        return ended

    def _submit(self, stream: Stream) -> None:
        if self.stopped or self._link is None:
            raise EngineStoppedError("the engine has stopped")
        self._admission.take_slots(stream)
        stream.id = next(self._ids)
        self._streams[stream.id] = stream
        requests = [sample.request for sample in stream.samples]
        self._link.send(Add(stream.id, requests, self.weight_of(stream.tenant)))

    def _pause(self, stream: Stream) -> None:
        if self._link is not None and stream.id is not None:
            self._link.send(Control(stream.id, "pause" if stream.paused else "resume"))

    def _release(self, stream: Stream) -> None:
        self._admission.leave(stream)
        if stream.id is not None:
            del self._streams[stream.id]
            if not stream.finished and self._link is not None:
                self._link.send(Control(stream.id, "cancel"))
        self._note_idle()

    def _note_idle(self) -> None:
        if not (self._admission.live or self._other_calls):
            self._idle.set()

    def _receive(self, message: FromEngine) -> None:
        match message:
            case list():
                for output in message:
                    if (stream := self._streams.get(output.request)) is not None:
                        stream.put(output)
            case MemoryResponse(call_id, result, error):
                call = self._memory_calls.get(call_id)
                if call is not None and not call.done():
                    call.set_result(result) if error is None else call.set_exception(error)
            case AuditResult():
                _call_listener(self.on_audited, message)
            case EngineReport():
                _call_listener(self.reports.add, message)
            case TokenizerFound(class_path):
                self.on_tokenizer(class_path)
            case Ready(info):
                if not self._started.done():
                    self._started.set_result(info)
            case Died(error):
                self._died(error)

    def _lost(self) -> None:
        if not self.stopped or not self._started.done():
            self._died(EngineStoppedError(self._runner.end))

    def _died(self, error: BaseException) -> None:
        if not self._started.done():
            self._started.set_exception(error)
            return
        if self.stopped:
            return
        self.stopped = True
        _log.error("engine died", live=len(self._admission.live), error=f"{type(error).__name__}: {error}")
        self.fail_live(lambda: EngineStoppedError("the engine has stopped"))
        self.on_stopped()


def _call_listener(listener: Callable[[Result], None], what: Result) -> None:
    """Calls a listener. Its errors are logged: raised here, they would close the link, which would end the engine."""
    try:
        listener(what)
    except Exception:
        _log.exception("a message of the engine could not be used", message=type(what).__name__)
