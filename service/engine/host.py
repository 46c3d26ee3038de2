"""Where the engine runs: its loop at the engine's end of a link, on a thread or in a process of its own.

Knows engines, sequences, tenants' memories and grammars; nothing of gRPC.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import structlog

from model_runner.errors import EngineStoppedError
from model_runner.sequence import Finish, FinishReason, Sequence, StepOutput
from service.engine.link import Add, Ask, Cancel, Died, EngineEnd, Ready, Stepped, Written, portable
from service.engine.memory_desk import MemoryDesk
from service.memory import TenantMemory
from service.serving import Grammars
from strategies import Strategy

_log = structlog.get_logger(__name__)

_MEMORY_SECONDS = 3.0
"""How long the start waits for what tenants taught other processes; serving begins without it where it takes longer."""


class StepEngine(Protocol):
    """`model_runner.engine.Engine`, as its host drives it. All calls come from one thread."""

    @property
    def has_work(self) -> bool: ...
    def add(self, sequence: Sequence) -> None: ...
    def cancel(self, sequence: Sequence) -> None: ...
    def step(self) -> list[StepOutput]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Hosted:
    """An engine, with what its sequences need from outside it.

    Attributes:
        memory: where a sequence's strategy comes from, and what it wrote goes to; not started yet.
        grammars: compiles what an answer must follow.
        facts: what the service is to know; sent to it when the engine stands.
        preload: how many tenants' memories, those written to last, come at once, for the strategy `preloaded`.
    """

    engine: StepEngine
    memory: TenantMemory
    grammars: Grammars
    facts: Any = None
    preload: int = 0
    preloaded: str = ""


@dataclass(eq=False, slots=True)
class _Request:
    """A request's samples that have not ended, whether the engine has them, and their use of the tenant's memory."""

    sequences: dict[int, Sequence]
    begun: bool = False
    lesson: AbstractContextManager[object] | None = None


class EngineHost:
    """Runs an engine at its end of a link until the other end is gone, or the engine dies.

    Args:
        make: makes the engine, on the thread of `run`; left when the engine is closed.
        interval: what steps write is told at most once in so many seconds; a sequence's first output and its last at
            once. Each message wakes two processes, ours and the client's.
    """

    def __init__(
        self, end: EngineEnd, make: Callable[[], AbstractContextManager[Hosted]], interval: float = 0.0
    ) -> None:
        self._end = end
        self._make = make
        self._interval = interval
        self._untold: list[Written] = []
        self._told_at = 0.0
        self._tasks: deque[Callable[[], None]] = deque()
        self._requests: dict[int, _Request] = {}
        self._names: dict[Sequence, int] = {}
        self._ended = False

    def run(self) -> None:
        """Never raises: the last message says why the engine ended, where somebody listens."""
        try:
            with self._make() as hosted:
                self._serve(hosted)
        except EOFError:
            pass
        except BaseException as error:
            self._say_last(error)
        finally:
            self._end.close()

    def between_steps(self, task: Callable[[], None]) -> None:
        """Runs `task`, which must not raise, on the engine's thread. From any thread.

        Raises:
            EngineStoppedError: the engine has ended.
        """
        if self._ended:
            raise EngineStoppedError("the engine has stopped")
        self._tasks.append(task)
        self._end.interrupt()

    def _serve(self, hosted: Hosted) -> None:
        engine, memory = hosted.engine, hosted.memory
        memory.start(self.between_steps, hosted.preload, hosted.preloaded)
        desk = MemoryDesk(memory, self._end.send)
        try:
            self._await(memory)
            self._end.send(Ready(hosted.facts))
            while True:
                self._obey(hosted, desk)
                self._tell(engine.step())
        except EOFError:
            raise
        except BaseException as error:
            _log.error("engine died", live=len(self._names), exc_info=error)
            raise
        finally:
            self._ended = True
            for name in [*self._requests]:
                self._cancel(engine, name)
            try:
                engine.close()
            except Exception:
                _log.exception("engine could not be closed")
            desk.close()
            memory.stop()

    def _await(self, memory: TenantMemory) -> None:
        """Gives what tenants taught other processes a moment to arrive, so that the first requests draft from it."""
        deadline = time.monotonic() + _MEMORY_SECONDS
        while not memory.arrived and time.monotonic() < deadline:
            self._do_tasks()
            time.sleep(0.005)

    def _do_tasks(self) -> None:
        while self._tasks:
            self._tasks.popleft()()

    def _obey(self, hosted: Hosted, desk: MemoryDesk) -> None:
        """Does what tasks and messages say, and waits for one while the engine has no work."""
        while True:
            self._do_tasks()
            message = self._end.receive(wait=not hosted.engine.has_work)
            match message:
                case Add(sequences):
                    self._add(hosted, sequences)
                case Cancel(names):
                    for name in names:
                        self._cancel(hosted.engine, name)
                case Ask():
                    desk.handle(message)
                case None if hosted.engine.has_work and not self._tasks:
                    return

    def _add(self, hosted: Hosted, sequences: dict[int, Sequence]) -> None:
        self._tell_now()  # a long step may follow, for the prompt
        request = _Request(sequences)
        self._requests |= dict.fromkeys(sequences, request)
        self._names |= {sequence: name for name, sequence in sequences.items()}
        try:
            _compile_format(sequences, hosted.grammars)
        except Exception as error:
            self._fail(request, error)
            return
        first = next(iter(sequences.values()))
        if first.max_draft_nodes == 0:
            self._begin(hosted, request, None)
            return
        later = lambda strategy: self.between_steps(lambda: self._begin(hosted, request, strategy))  # noqa: E731
        try:
            strategy = hosted.memory.fetch(first.tenant, first.strategy_name, later)
        except Exception as error:
            _log.exception("strategy cannot be had", strategy=first.strategy_name, request_id=first.request_id)
            for sequence in sequences.values():
                sequence.stats.drafting_disabled_reason = f"the strategy cannot be had: {type(error).__name__}: {error}"
            self._begin(hosted, request, None)
            return
        if strategy is not None:
            self._begin(hosted, request, strategy)

    def _begin(self, hosted: Hosted, request: _Request, strategy: Strategy | None) -> None:
        """Hands the samples to the engine; those that were cancelled while their memory came are gone."""
        sequences = [*request.sequences.values()]
        if not sequences:
            return
        request.begun = True
        for sequence in sequences:
            sequence.strategy = strategy
        if strategy is not None:
            request.lesson = hosted.memory.lesson(sequences)
            request.lesson.__enter__()
        for sequence in sequences:
            try:
                hosted.engine.add(sequence)
            except Exception as error:
                self._tell([StepOutput(sequence, [], [], [], Finish(FinishReason.ERROR, error=error))])

    def _fail(self, request: _Request, error: Exception) -> None:
        finish = Finish(FinishReason.ERROR, error=error)
        self._tell([StepOutput(sequence, [], [], [], finish) for sequence in request.sequences.values()])

    def _cancel(self, engine: StepEngine, name: int) -> None:
        request = self._requests.get(name)
        if request is not None:
            if request.begun:
                engine.cancel(request.sequences[name])
            self._end_sample(name)

    def _end_sample(self, name: int) -> None:
        request = self._requests.pop(name)
        del self._names[request.sequences.pop(name)]
        if not request.sequences and request.lesson is not None:
            try:
                request.lesson.__exit__(None, None, None)
            except Exception:
                _log.exception("what a request wrote could not be learned")

    def _tell(self, outputs: list[StepOutput]) -> None:
        written = [message for output in outputs if (message := self._written(output)) is not None]
        self._untold += written
        urgent = any(message.stats is not None for message in written)
        if urgent or time.perf_counter() - self._told_at >= self._interval:
            self._tell_now()

    def _tell_now(self) -> None:
        if self._untold:
            self._end.send(Stepped(self._untold))
            self._untold = []
            self._told_at = time.perf_counter()

    def _written(self, output: StepOutput) -> Written | None:
        sequence, finish = output.sequence, output.finish
        name = self._names.get(sequence)
        if name is None:
            return None
        if finish is not None:
            self._end_sample(name)
            if finish.error is not None:
                error = portable(finish.error)
                assert isinstance(error, Exception)
                finish = replace(finish, error=error)
        first = len(sequence.output) == len(output.token_ids)
        stats = sequence.stats if first or finish is not None else None
        return Written(name, output.token_ids, output.texts, output.drafted, finish, output.logprobs, stats)

    def _say_last(self, error: BaseException) -> None:
        try:
            self._end.send(Died(portable(error)))
        except EOFError:
            _log.error("engine ended, and nobody is there to hear it", exc_info=error)


def _compile_format(sequences: dict[int, Sequence], grammars: Grammars) -> None:
    """One grammar for the samples of a request, which share its format."""
    chosen = next(iter(sequences.values())).format
    if chosen is not None:
        grammar = grammars.compile(chosen.kind, chosen.text)
        for sequence in sequences.values():
            sequence.grammar = grammar.copy()


class EngineThread:
    """Hosts an engine on a thread of this process, for engines that are at hand: those of tests."""

    def __init__(self, make: Callable[[], AbstractContextManager[Hosted]], interval: float = 0.0) -> None:
        self._make = make
        self._interval = interval
        self._thread: threading.Thread | None = None

    def start(self, connection: socket.socket) -> None:
        host = EngineHost(EngineEnd(connection), self._make, self._interval)
        self._thread = threading.Thread(target=host.run, name="engine", daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> bool:
        """Whether it ended within that time; a thread that hangs in a step dies with the process."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

    @property
    def end(self) -> str:
        """How it ended, for a message."""
        return "the engine's thread ended"
