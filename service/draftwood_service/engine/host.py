"""Runs the engine's loop at the engine's end of a link, on a thread or in a process of its own.

Works with engines, sequences, tenants' memories and grammars; contains nothing of gRPC.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import structlog

from draftwood_memory import Learning, Memory
from draftwood_memory.operations import PurgeMemory
from draftwood_model_runner.errors import EngineStoppedError
from draftwood_model_runner.output import Finish, StepOutput
from draftwood_model_runner.request import Format, Request
from draftwood_model_runner.sampling.background import background_threads
from draftwood_model_runner.sequence import Sequence
from draftwood_service.audits.auditor import Auditor
from draftwood_service.audits.results import AuditResult
from draftwood_service.engine.link import (
    Add,
    Audited,
    Cancel,
    Died,
    EngineEnd,
    MemoryRequest,
    MemoryResponse,
    Pause,
    Ready,
    Reported,
    Resume,
    SequenceOutput,
    Stepped,
    portable,
)
from draftwood_service.engine.loaded import LoadedEngine, StepEngine, learning, use_of
from draftwood_service.engine.reporting.reporter import Reporter, WorkLedger
from draftwood_service.serving import Grammars
from draftwood_strategies import Strategy

_log = structlog.get_logger(__name__)

_PRELOAD_SECONDS = 3.0
"""How long the start waits for the preloaded memories; after it, serving begins without them. `draftwood bench share`
measured half a second for a tenant of a million tokens."""

_COMPILING_THREADS = 2
"""They compile what passed a check in the service, without the interpreter's lock."""


@dataclass(eq=False, slots=True)
class _SampleGroup:
    """A request's samples that have not ended.

    Attributes:
        begun: the engine has them.
        learning: the request's use of its tenant's memory; None without drafts.
    """

    sequences: dict[int, Sequence]
    begun: bool = False
    learning: AbstractContextManager[Learning] | None = None


class EngineHost:
    """Runs an engine at its end of a link until the other end is closed, or the engine dies.

    Args:
        load: loads the engine, on the thread of `run`; exited when the engine is closed.
        interval: seconds between two messages of outputs at least, except that a sequence's first and last output are
            sent at once. Each message wakes two processes, the service and the client.
    """

    def __init__(
        self, end: EngineEnd, load: Callable[[], AbstractContextManager[LoadedEngine]], interval: float = 0.0
    ) -> None:
        self._end = end
        self._load = load
        self._interval = interval
        self._unsent: list[SequenceOutput] = []
        self._sent_at = 0.0
        self._tasks: deque[Callable[[], None]] = deque()
        self._groups: dict[int, _SampleGroup] = {}
        self._ids: dict[Sequence, int] = {}
        self._auditor = Auditor(self._send_audit)
        self._ledger = WorkLedger()
        self._ended = False
        self._compiling = background_threads(_COMPILING_THREADS, "grammar")

    def run(self) -> None:
        """Never raises: the last message has the error that ended the engine."""
        try:
            with self._load() as loaded:
                self._serve(loaded)
        except EOFError:
            pass
        except BaseException as error:
            self._report_end(error)
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

    def _serve(self, loaded: LoadedEngine) -> None:
        engine, memory = loaded.engine, loaded.memory
        memory.start(self.between_steps, loaded.preload, loaded.strategy)
        report = lambda: self._ledger.report(engine, self._ids)  # noqa: E731
        of_memory = loaded.memory_report or (lambda: (memory.counters(), memory.healthy))
        reporter = Reporter(report, self.between_steps, lambda made: self._end.send(Reported(made)), of_memory)
        try:
            self._await_preload(memory)
            self._end.send(Ready(loaded.info))
            reporter.start()
            while True:
                self._process_messages(loaded)
                if engine.has_work:
                    self._queue_outputs(engine.step())
                elif engine.idle:
                    self._auditor.step(engine)
        except EOFError:
            raise
        except BaseException as error:
            _log.error("engine died", live=len(self._ids), exc_info=error)
            raise
        finally:
            self._ended = True
            reporter.stop()
            self._compiling.shutdown(wait=False, cancel_futures=True)
            for sequence_id in [*self._groups]:
                self._cancel(engine, sequence_id)
            try:
                engine.close()
            except Exception:
                _log.exception("engine could not be closed")
            memory.stop()

    def _await_preload(self, memory: Memory) -> None:
        """Waits a moment for the preloaded memories, so that the first requests draft from them."""
        deadline = time.monotonic() + _PRELOAD_SECONDS
        while not memory.preloaded and time.monotonic() < deadline:
            self._run_tasks()
            time.sleep(0.005)

    def _run_tasks(self) -> None:
        while self._tasks:
            self._tasks.popleft()()

    def _process_messages(self, loaded: LoadedEngine) -> None:
        """Runs tasks and processes messages, and waits for one while there is no step to make."""
        while True:
            self._run_tasks()
            message = self._end.receive(wait=not self._has_step(loaded.engine))
            match message:
                case Add(requests, weight):
                    self._add(loaded, requests, weight)
                case Cancel(ids):
                    for sequence_id in ids:
                        self._cancel(loaded.engine, sequence_id)
                case Pause(ids):
                    for sequence in self._begun(ids):
                        loaded.engine.pause(sequence)
                case Resume(ids):
                    for sequence in self._begun(ids):
                        loaded.engine.resume(sequence)
                case MemoryRequest(call_id, operation):
                    if isinstance(operation, PurgeMemory):
                        self._auditor.purge(operation.tenant)
                    future = loaded.memory.submit(operation)
                    future.add_done_callback(partial(self._respond, call_id))
                case None if self._has_step(loaded.engine) and not self._tasks:
                    return

    def _has_step(self, engine: StepEngine) -> bool:
        """Whether the engine has work, or is idle with answers to audit: no request is about to begin."""
        if engine.has_work:
            return True
        return engine.idle and self._auditor.has_work and all(group.begun for group in self._groups.values())

    def _respond(self, call_id: int, done: Future[Any]) -> None:
        """Sends an operation's result. On the memory thread."""
        error = EngineStoppedError("the engine has stopped") if done.cancelled() else done.exception()
        response = MemoryResponse(call_id, None if error else done.result(), portable(error) if error else None)
        with suppress(EOFError):
            self._end.send(response)

    def _add(self, loaded: LoadedEngine, requests: dict[int, Request], weight: float) -> None:
        self._send_outputs()  # the next step may be long, with a prompt
        sequences = {sequence_id: Sequence(request) for sequence_id, request in requests.items()}
        group = _SampleGroup(sequences)
        self._groups |= dict.fromkeys(sequences, group)
        self._ids |= {sequence: sequence_id for sequence_id, sequence in sequences.items()}
        first = next(iter(requests.values()))
        if weight == 1.0:
            loaded.weights.pop(first.tenant, None)
        else:
            loaded.weights[first.tenant] = weight
        if loaded.grammars is None:
            self._begin(loaded, group, None)
            return
        if first.format is None:
            self._fetch_memory(loaded, group, first)
            return
        compiled = self._compiling.submit(_compile_format, [*sequences.values()], first.format, loaded.grammars)

        def go_on(done: Future[None]) -> None:
            with suppress(EngineStoppedError):
                self.between_steps(lambda: self._compiled(loaded, group, first, done))

        compiled.add_done_callback(go_on)

    def _compiled(self, loaded: LoadedEngine, group: _SampleGroup, first: Request, done: Future[None]) -> None:
        error = done.exception()
        if isinstance(error, Exception):
            self._fail(group, error)
        else:
            self._fetch_memory(loaded, group, first)

    def _fetch_memory(self, loaded: LoadedEngine, group: _SampleGroup, first: Request) -> None:
        """Begins with the tenant's memory, at once or when it is loaded; without one if there are no drafts."""
        if first.max_draft_nodes == 0:
            self._begin(loaded, group, None)
            return
        later = lambda strategy: self.between_steps(lambda: self._begin(loaded, group, strategy))  # noqa: E731
        try:
            strategy = loaded.memory.fetch(use_of(first), later)
        except Exception as error:
            _log.exception("strategy not available", strategy=first.strategy_name, request_id=first.request_id)
            for sequence in group.sequences.values():
                sequence.stats.drafting_disabled_reason = f"strategy not available: {type(error).__name__}: {error}"
            self._begin(loaded, group, None)
            return
        if strategy is not None:
            self._begin(loaded, group, strategy)

    def _begin(self, loaded: LoadedEngine, group: _SampleGroup, strategy: Strategy | None) -> None:
        """Adds the samples to the engine, except those that were cancelled while their memory was loaded."""
        sequences = [*group.sequences.values()]
        if not sequences:
            return
        group.begun = True
        for sequence in sequences:
            sequence.strategy = strategy
        if strategy is not None and sequences[0].request.learns:
            group.learning = learning(loaded.memory, sequences)
            if group.learning.__enter__().repeated:  # what is new of its answer is learned when it ends
                for sequence in sequences:
                    sequence.request = replace(sequence.request, learns=False)
        self._auditor.begin(loaded, sequences)
        for sequence in sequences:
            try:
                loaded.engine.add(sequence)
            except Exception as error:
                self._queue_outputs([StepOutput.failed(sequence, error)])

    def _fail(self, group: _SampleGroup, error: Exception) -> None:
        self._queue_outputs([StepOutput.failed(sequence, error) for sequence in group.sequences.values()])

    def _cancel(self, engine: StepEngine, sequence_id: int) -> None:
        group = self._groups.get(sequence_id)
        if group is not None:
            if group.begun:
                engine.cancel(group.sequences[sequence_id])
            self._end_sample(sequence_id)

    def _begun(self, ids: list[int]) -> Iterator[Sequence]:
        """Those of the sequences that the engine has."""
        for sequence_id in ids:
            group = self._groups.get(sequence_id)
            if group is not None and group.begun:
                yield group.sequences[sequence_id]

    def _end_sample(self, sequence_id: int, finish: Finish | None = None) -> None:
        group = self._groups.pop(sequence_id)
        sequence = group.sequences.pop(sequence_id)
        del self._ids[sequence]
        self._ledger.ended(sequence)
        self._auditor.end(sequence, finish)
        if not group.sequences and group.learning is not None:
            try:
                group.learning.__exit__(None, None, None)
            except Exception:
                _log.exception("output of a request could not be learned")

    def _queue_outputs(self, outputs: list[StepOutput]) -> None:
        """Queues a step's outputs; sends the queue if it is time, else what it has of sequences that begin or end."""
        queued = [message for output in outputs if (message := self._message(output)) is not None]
        self._unsent += queued
        if time.perf_counter() - self._sent_at >= self._interval:
            self._send_outputs()
        elif urgent := {message.id for message in queued if message.stats is not None}:
            self._end.send(Stepped([message for message in self._unsent if message.id in urgent]))
            self._unsent = [message for message in self._unsent if message.id not in urgent]

    def _send_outputs(self) -> None:
        if self._unsent:
            self._end.send(Stepped(self._unsent))
            self._unsent = []
            self._sent_at = time.perf_counter()

    def _message(self, output: StepOutput) -> SequenceOutput | None:
        sequence, finish = output.sequence, output.finish
        sequence_id = self._ids.get(sequence)
        if sequence_id is None:
            return None
        if finish is not None:
            self._end_sample(sequence_id, finish)
            if finish.error is not None:
                error = portable(finish.error)
                assert isinstance(error, Exception)
                finish = replace(finish, error=error)
        first = len(sequence.output) == len(output.token_ids)
        stats = sequence.stats if first or finish is not None else None
        trees = () if output.tree is None else (output.tree,)
        return SequenceOutput(
            sequence_id, output.token_ids, output.texts, output.drafted, finish, output.logprobs, stats, trees
        )

    def _send_audit(self, result: AuditResult) -> None:
        self._end.send(Audited(result))

    def _report_end(self, error: BaseException) -> None:
        try:
            self._end.send(Died(portable(error)))
        except EOFError:
            _log.error("engine ended after the service", exc_info=error)


def _compile_format(sequences: list[Sequence], chosen: Format, grammars: Grammars) -> None:
    """Compiles a request's format once; the first sample gets the grammar, and each other one a copy."""
    grammar = grammars.compile(chosen.kind, chosen.text)
    for sequence in sequences[1:]:
        sequence.grammar = grammar.copy()
    sequences[0].grammar = grammar
