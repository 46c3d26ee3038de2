"""Prepares a request for the engine: compiles its format, and fetches the strategy of its tenant's memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial

import structlog

from draftwood_memory import Learning
from draftwood_model_runner.errors import EngineStoppedError
from draftwood_model_runner.request import Format
from draftwood_model_runner.sampling.grammar import background_threads
from draftwood_model_runner.sequence import Sequence
from draftwood_service.engine.loaded import LoadedEngine, use_of
from draftwood_service.serving import Grammars
from draftwood_strategies import Strategy

_log = structlog.get_logger(__name__)

_COMPILING_THREADS = 2
"""They compile what passed a check in the service, without the interpreter's lock."""


@dataclass(eq=False, slots=True)
class LiveRequest:
    """A request in the engine's process.

    Attributes:
        id: on the link.
        samples: those that have not ended, by number.
        begun: the engine has them.
        learning: its use of its tenant's memory; None without drafts.
    """

    id: int
    samples: dict[int, Sequence]
    begun: bool = False
    learning: AbstractContextManager[Learning] | None = None


class Preparation:
    """Prepares requests beside the engine's steps; to be called on its thread.

    Args:
        between_steps: runs a task on that thread; raises EngineStoppedError once the engine has ended.
        begin: called there with a prepared request and its strategy; None without drafts. Called again, with another
            strategy, for a request that began before its memory was loaded.
        fail: called there with a request whose format cannot be compiled.
    """

    def __init__(
        self,
        loaded: LoadedEngine,
        between_steps: Callable[[Callable[[], None]], None],
        begin: Callable[[LiveRequest, Strategy | None], None],
        fail: Callable[[LiveRequest, Exception], None],
    ) -> None:
        self._loaded = loaded
        self._between_steps = between_steps
        self._begin = begin
        self._fail = fail
        self._compiling = background_threads(_COMPILING_THREADS, "grammar")

    def prepare(self, live: LiveRequest) -> None:
        """Begins the request, at once if there is nothing to wait for."""
        samples = [*live.samples.values()]
        if self._loaded.grammars is None:
            self._begin(live, None)
        elif (chosen := samples[0].request.format) is None:
            self._fetch_memory(live, samples)
        else:
            compiled = self._compiling.submit(_compile_format, samples, chosen, self._loaded.grammars)
            compiled.add_done_callback(partial(self._compiled, live, samples))

    def close(self) -> None:
        """Compiles nothing more."""
        self._compiling.shutdown(wait=False, cancel_futures=True)

    def _compiled(self, live: LiveRequest, samples: list[Sequence], done: Future[None]) -> None:
        """On a thread that compiles."""

        def go_on() -> None:
            error = done.exception()
            if isinstance(error, Exception):
                self._fail(live, error)
            else:
                self._fetch_memory(live, samples)

        with suppress(EngineStoppedError):
            self._between_steps(go_on)

    def _fetch_memory(self, live: LiveRequest, samples: list[Sequence]) -> None:
        """Begins with the tenant's memory, at once or when it is loaded; without one if there are no drafts."""
        request = samples[0].request
        if request.drafting.max_nodes == 0:
            self._begin(live, None)
            return
        on_loaded = lambda strategy: self._between_steps(lambda: self._begin(live, strategy))  # noqa: E731
        try:
            strategy = self._loaded.memory.fetch(use_of(request), on_loaded)
        except Exception as error:
            _log.exception("strategy not available", strategy=request.drafting.strategy, request_id=request.request_id)
            for sequence in samples:
                sequence.stats.drafting_disabled_reason = f"strategy not available: {type(error).__name__}: {error}"
            self._begin(live, None)
            return
        if strategy is not None:
            self._begin(live, strategy)


def _compile_format(samples: list[Sequence], chosen: Format, grammars: Grammars) -> None:
    """Compiles a request's format once; the first sample gets the grammar, and each other one a copy."""
    grammar = grammars.compile(chosen.kind, chosen.text)
    for sequence in samples[1:]:
        sequence.grammar = grammar.copy()
    samples[0].grammar = grammar
