"""The live requests of an engine: each begins with its first token, drafts when its memory is there, and ends."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from draftwood_memory.engines.draft_metrics import DraftMetrics
from draftwood_memory.engines.exclusion import Exclusion
from draftwood_memory.engines.options import RequestOptions
from draftwood_memory.engines.policy import RequestPolicy
from draftwood_memory.engines.session import Row, Session, SessionRequest
from draftwood_memory.memory import Memory, StrategyUse
from draftwood_memory.records import Int32Array
from draftwood_strategies import Strategy, create
from draftwood_strategies.base import DraftStats, SupportsReadOnly
from draftwood_strategies.draft_engine.engine import DraftEngine

_log = logging.getLogger("draftwood")

_MAX_REFUSALS = 100
"""Problems that are logged."""


class Sessions(Mapping[str, Session]):
    """By the engine's ids of requests. Every method is called with `exclusion` held.

    Args:
        drafts: that sessions draft with.
        is_live: whether the engine still knows a request, running or not.
        output_of: int32[n], what a request wrote, once it has ended; None before, or if that is not known.

    Attributes:
        policy: decides how requests are drafted for.
        metrics: counts what was drafted.
    """

    def __init__(
        self,
        memory: Memory,
        policy: RequestPolicy,
        drafts: DraftEngine,
        exclusion: Exclusion,
        is_live: Callable[[str], bool],
        output_of: Callable[[str], Int32Array | None],
    ) -> None:
        self.policy = policy
        self.metrics = DraftMetrics()
        self._memory = memory
        self._drafts = drafts
        self._exclusion = exclusion
        self._is_live = is_live
        self._output_of = output_of
        self._live: dict[str, Session] = {}
        self._tasks: deque[Callable[[], None]] = deque()
        self._blank = lru_cache(64)(create)
        self._refused: set[str] = set()

    def __getitem__(self, request_id: str) -> Session:
        return self._live[request_id]

    def __iter__(self) -> Any:
        return iter([*self._live])

    def __len__(self) -> int:
        return len(self._live)

    def of(self, row: Row) -> Session:
        """The session of a row, which begins if it is new."""
        session = self._live.get(row.request_id)
        if session is None or session.seen > row.tokens.shape[0]:
            if session is not None:  # the engine has taken tokens back
                self.end(row.request_id)
            session = self.begin(row)
        return session

    def begin(self, row: Row) -> Session:
        """A new session: it drafts when its memory is there."""
        session = self._live[row.request_id] = self._started(row)
        return session

    def end(self, request_id: str) -> None:
        """Ends a session: its memory learns what it wrote."""
        session = self._live.pop(request_id)
        try:
            output = self._output_of(request_id)
            if output is not None:
                session.finish(output)
        except Exception:
            _log.exception("the last tokens of request %r are not learned", request_id)
        try:
            session.close()
        except Exception:
            _log.exception("output of request %r could not be learned", request_id)
        self.metrics.ended(session)
        if self._is_live(request_id) or not session.output:
            return  # the process ends, the engine has taken tokens back, or it ended in its prompt
        try:
            self.policy.ended(session)
        except Exception:
            _log.exception("request %r could not be counted", request_id)

    def end_gone(self, rows: SequenceOf[Row] = ()) -> None:
        """Ends those that are not in these rows and that the engine does not know any more."""
        if rows and len(self) <= len(rows) and all(row.request_id in self._live for row in rows):
            return
        here = {row.request_id for row in rows}
        for request_id in self:
            if request_id not in here and not self._is_live(request_id):
                self.end(request_id)

    def end_all(self) -> None:
        for request_id in self:
            self.end(request_id)

    def between_steps(self, task: Callable[[], None]) -> None:
        """Lets `run_tasks` run a task. From any thread, without `exclusion`."""
        self._tasks.append(task)

    @property
    def has_tasks(self) -> bool:
        """There is something to be run between two steps. Needs no `exclusion`."""
        return len(self._tasks) > 0

    def run_tasks(self, limit: int | None = None) -> None:
        """Runs what was to be run between two steps, or so many of these tasks."""
        done = 0
        while self._tasks and (limit is None or done < limit):
            done += 1
            try:
                self._exclusion.run(self._tasks.popleft())
            except Exception:
                _log.exception("a task between two steps failed")

    def _started(self, row: Row) -> Session:
        try:
            options = self.policy.options_of(row.request_id, row.options)
        except Exception as error:
            self._refuse(str(error))
            options = RequestOptions()
        prompt = row.tokens[: row.prompt].astype(np.int32)
        drafting = options.drafting
        request = SessionRequest(row.request_id, prompt, drafting, options.learns)
        session = Session(request, DraftStats(), options=options, seen=row.prompt, stop_token_ids=row.stop_token_ids)
        if drafting.max_nodes == 0:
            return session
        try:
            self._fetch(session)
        except Exception as error:
            self._refuse(f"draftwood_strategy {drafting.strategy}: {error}")
        return session

    def _fetch(self, session: Session) -> None:
        """Lets a session draft, at once or when its tenant's memory is there."""
        options = session.options
        if not options.tenant:
            strategy = self._blank(options.drafting.strategy, **dict(options.drafting.options))
            if not isinstance(strategy, SupportsReadOnly):
                strategy = create(options.drafting.strategy, **dict(options.drafting.options))
                session.request = replace(session.request, learns=True)
            self._begin(session, strategy, None)
            return
        use = options.use

        def on_loaded(loaded: Strategy) -> None:
            self.between_steps(lambda: self._begin(session, loaded, use))

        present = self._memory.fetch(use, on_loaded)
        if session.request.learns:
            # Whether or not it is present: a short answer may end before its memory is there.
            session.learning = self._memory.learning(use.memory, request=options.key)
            if session.learning.repeated:  # what is new of its answer is learned when it ends
                session.request = replace(session.request, learns=False)
        if present is not None:
            self._begin(session, present, use)

    def _begin(self, session: Session, strategy: Strategy, use: StrategyUse | None) -> None:
        """Lets a session draft; `use` of a tenant's memory, None without one."""
        if session.ended or session.stats.drafting_disabled_reason:
            return
        alike = None if use is None else (use.memory, use.key)
        written = np.concatenate(session.output).tolist() if session.output else []
        self._drafts.begin(session, strategy, alike, written)
        if session.learning is not None:
            session.learning.strategy = strategy  # its drafter tells it what is written

    def _refuse(self, problem: str) -> None:
        """A request is not drafted for. Logged once for each problem, as clients repeat theirs."""
        if len(self._refused) < _MAX_REFUSALS and problem not in self._refused:
            self._refused.add(problem)
            _log.warning("requests are not drafted for: %s", problem)
