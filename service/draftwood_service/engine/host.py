"""Runs the engine's loop at the engine's end of a link, on a thread or in a process of its own.

Works with engines, sequences and tenants' memories; contains nothing of gRPC.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import structlog

from draftwood_memory.operations import PurgeMemory
from draftwood_model_runner.errors import EngineStoppedError
from draftwood_model_runner.output import Finish, StepOutput
from draftwood_model_runner.sequence import Sequence
from draftwood_service.engine.audits import Auditor
from draftwood_service.engine.link import (
    Add,
    Control,
    Died,
    EngineEnd,
    MemoryRequest,
    MemoryResponse,
    Ready,
    picklable,
    service_has_ended,
)
from draftwood_service.engine.loaded import LoadedEngine, learning
from draftwood_service.engine.preparation import LiveRequest, Preparation
from draftwood_service.engine.reports import Reporter, WorkRecorder
from draftwood_service.engine.stream import Output
from draftwood_strategies import Strategy

_log = structlog.get_logger(__name__)

_PRELOAD_SECONDS = 3.0
"""How long the start waits for the preloaded memories; after it, serving begins without them. A tenant
of a million tokens takes half a second."""

_QUIET_SECONDS = 0.1
"""How long no request has been live when idle work begins: a client's next request would wait for a step of it."""


def run_engine(end: EngineEnd, load: Callable[[], AbstractContextManager[LoadedEngine]], interval: float = 0.0) -> None:
    """Runs an engine at its end of a link until the other end is closed, or the engine dies. Never raises: the last
    message has the error that ended the engine.

    Args:
        load: loads the engine; exited when the engine is closed.
        interval: see `EngineHost`.
    """
    try:
        with load() as loaded:
            EngineHost(end, loaded, interval).serve()
    except BaseException as error:
        try:
            end.send(Died(picklable(error)))
        except EOFError:
            if not isinstance(error, EOFError) and not service_has_ended(error):
                _log.error("engine ended after the service", exc_info=error)
    finally:
        end.close()


class EngineHost:
    """Serves a link with a loaded engine, all on one thread.

    Args:
        interval: seconds between two messages of outputs at least, except that a sequence's first and last output are
            sent at once. Each message wakes two processes, the service and the client.
    """

    def __init__(self, end: EngineEnd, loaded: LoadedEngine, interval: float) -> None:
        self._end = end
        self._loaded = loaded
        self._engine = loaded.engine
        self._interval = interval
        self._unsent: list[Output] = []
        self._sent_at = 0.0
        self._tasks: deque[Callable[[], None]] = deque()
        self._live: dict[int, LiveRequest] = {}
        self._names: dict[Sequence, tuple[LiveRequest, int]] = {}
        self._preparation = Preparation(loaded, self.between_steps, self._begin, self._fail)
        self._auditor = Auditor(end.send)
        self._recorder = WorkRecorder()
        own_text = loaded.own_text
        self._own_text = None if own_text is None or own_text.done else own_text
        self._quiet_since = float("-inf")
        self._ended = False

    def between_steps(self, task: Callable[[], None]) -> None:
        """Runs `task`, which must not raise, on the engine's thread. From any thread.

        Raises:
            EngineStoppedError: the engine has ended.
        """
        if self._ended:
            raise EngineStoppedError("the engine has stopped")
        self._tasks.append(task)
        self._end.interrupt()

    def serve(self) -> None:
        """Raises EOFError once the other end is closed, and what the engine raises."""
        engine, memory = self._engine, self._loaded.memory
        memory.start(self.between_steps, self._loaded.preload, self._loaded.strategy)
        report = lambda: self._recorder.report(engine, self._names)  # noqa: E731
        of_memory = self._loaded.memory_report or (lambda: (memory.counters(), memory.healthy))
        reporter = Reporter(report, self.between_steps, self._end.send, of_memory)
        try:
            self._await_preload()
            self._end.send(Ready(self._loaded.info))
            reporter.start()
            while True:
                self._process_messages()
                if engine.has_work:
                    self._queue_outputs(engine.step())
                    self._quiet_since = time.monotonic()
                elif engine.idle:
                    self._idle_step()
        except EOFError:
            raise
        except BaseException as error:
            _log.error("engine died", live=len(self._names), exc_info=error)
            raise
        finally:
            self._ended = True
            reporter.stop()
            self._preparation.close()
            for live in [*self._live.values()]:
                self._cancel(live)
            try:
                engine.close()
            except Exception:
                _log.exception("engine could not be closed")
            memory.stop()

    def _await_preload(self) -> None:
        """Waits a moment for the preloaded memories, so that the first requests draft from them."""
        deadline = time.monotonic() + _PRELOAD_SECONDS
        while not self._loaded.memory.preloaded and time.monotonic() < deadline:
            self._run_tasks()
            time.sleep(0.005)
        if not self._loaded.memory.preloaded:
            _log.info("serving before all memories are loaded", waited=_PRELOAD_SECONDS)

    def _run_tasks(self) -> None:
        while self._tasks:
            self._tasks.popleft()()

    def _process_messages(self) -> None:
        """Runs tasks and processes messages, and waits for one while there is no step to make."""
        while True:
            self._run_tasks()
            message = self._end.receive(self._seconds_to_step())
            match message:
                case Add():
                    self._add(message)
                case Control(request, action):
                    self._control(request, action)
                case MemoryRequest(call_id, operation):
                    if isinstance(operation, PurgeMemory):
                        self._auditor.purge(operation.tenant)
                    future = self._loaded.memory.submit(operation)
                    future.add_done_callback(partial(self._respond, call_id))
                case None if self._seconds_to_step() == 0 and not self._tasks:
                    return

    def _seconds_to_step(self) -> float | None:
        """0 if there is a step to make: the engine has work, or other work and no request for a while. None if there
        will be none before a message or a task."""
        if self._engine.has_work:
            return 0.0
        has_idle_work = self._own_text is not None or self._auditor.has_work
        if not (self._engine.idle and has_idle_work and all(live.begun for live in self._live.values())):
            return None
        return max(0.0, self._quiet_since + _QUIET_SECONDS - time.monotonic())

    def _idle_step(self) -> None:
        """One forward pass for the model's own text, or for an audit once that is complete."""
        if self._own_text is None:
            self._auditor.step(self._engine)
            return
        try:
            self._own_text.step()
        except Exception:
            _log.exception("drafts begin without the model's own text, or with a part of it")
            self._recorder.own_text_failed = True
            self._own_text.close()
        else:
            if not self._own_text.done:
                return
            _log.info("the model's own text is written")
        self._own_text = None

    def _respond(self, call_id: int, done: Future[Any]) -> None:
        """Sends an operation's result. On the memory thread."""
        error = EngineStoppedError("the engine has stopped") if done.cancelled() else done.exception()
        response = MemoryResponse(call_id, None if error else done.result(), picklable(error) if error else None)
        with suppress(EOFError):
            self._end.send(response)

    def _add(self, message: Add) -> None:
        self._send_outputs()  # the next step may be long, with a prompt
        live = LiveRequest(message.id, {number: Sequence(sample) for number, sample in enumerate(message.samples)})
        self._live[live.id] = live
        self._names |= {sequence: (live, number) for number, sequence in live.samples.items()}
        tenant = message.samples[0].tenant
        if message.weight == 1.0:
            self._loaded.weights.pop(tenant, None)
        else:
            self._loaded.weights[tenant] = message.weight
        self._preparation.prepare(live)

    def _control(self, request: int, action: Literal["cancel", "pause", "resume"]) -> None:
        live = self._live.get(request)
        if live is None:
            return
        if action == "cancel":
            self._cancel(live)
        elif live.begun:
            change = self._engine.pause if action == "pause" else self._engine.resume
            for sequence in live.samples.values():
                change(sequence)

    def _begin(self, live: LiveRequest, strategy: Strategy | None) -> None:
        """Adds the samples to the engine, except if the request was cancelled while it was prepared. Exchanges the
        strategy of a request that runs: its memory was loaded late."""
        samples = [*live.samples.values()]
        if not samples:
            return
        for sequence in samples:
            if not sequence.stats.drafting_disabled_reason:  # what failed is not tried again
                sequence.strategy = strategy
        if live.begun:
            return
        live.begun = True
        if strategy is not None and samples[0].request.learns:
            live.learning = learning(self._loaded.memory, samples)
            if live.learning.__enter__().repeated:  # what is new of its answer is learned when it ends
                for sequence in samples:
                    sequence.request = replace(sequence.request, learns=False)
        self._auditor.begin(self._loaded, samples)
        for sequence in samples:
            try:
                self._engine.add(sequence)
            except Exception as error:
                self._queue_outputs([StepOutput.failed(sequence, error)])

    def _fail(self, live: LiveRequest, error: Exception) -> None:
        self._queue_outputs([StepOutput.failed(sequence, error) for sequence in live.samples.values()])

    def _cancel(self, live: LiveRequest) -> None:
        for sequence in [*live.samples.values()]:
            if live.begun:
                self._engine.cancel(sequence)
            self._end_sample(sequence)

    def _end_sample(self, sequence: Sequence, finish: Finish | None = None) -> None:
        live, number = self._names.pop(sequence)
        del live.samples[number]
        self._recorder.ended(sequence)
        self._auditor.end(sequence, finish)
        if not live.samples:
            del self._live[live.id]
            if live.learning is not None:
                try:
                    live.learning.__exit__(None, None, None)
                except Exception:
                    _log.exception("output of a request could not be learned")

    def _queue_outputs(self, outputs: list[StepOutput]) -> None:
        """Queues a step's outputs; sends the queue if it is time, else what it has of samples that begin or end."""
        queued = [message for output in outputs if (message := self._message(output)) is not None]
        self._unsent += queued
        if time.perf_counter() - self._sent_at >= self._interval:
            self._send_outputs()
        elif urgent := {(output.request, output.sample) for output in queued if output.stats is not None}:
            self._end.send([output for output in self._unsent if (output.request, output.sample) in urgent])
            self._unsent = [output for output in self._unsent if (output.request, output.sample) not in urgent]

    def _send_outputs(self) -> None:
        if self._unsent:
            self._end.send(self._unsent)
            self._unsent = []
            self._sent_at = time.perf_counter()

    def _message(self, output: StepOutput) -> Output | None:
        """The output to send for a sample's step; None if the sample was cancelled."""
        sequence, finish = output.sequence, output.finish
        if (sample := self._names.get(sequence)) is None:
            return None
        live, number = sample
        if finish is not None:
            self._end_sample(sequence, finish)
            if finish.error is not None:
                error = picklable(finish.error)
                assert isinstance(error, Exception)
                finish = replace(finish, error=error)
        first = len(sequence.output) == len(output.token_ids)
        return Output(
            live.id,
            number,
            output.token_ids,
            output.texts,
            output.drafted,
            finish,
            output.logprobs,
            [] if output.tree is None else [output.tree],
            sequence.stats if first or finish is not None else None,
        )
