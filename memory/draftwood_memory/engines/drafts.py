"""Chains of draft tokens for the rows of an engine's step, from tenants' memories, within the budget of the batch.

All is called by the engine's thread, after each of its steps, and by a thread of this module while the engine rests: it
ends requests that are gone, lets strategies learn and publishes figures. They exclude each other. Nothing here waits
for a store, and a call into a strategy is interrupted if it does not return.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from draftwood_memory.engines.exclusion import Exclusion
from draftwood_memory.engines.figures import Figures, Point
from draftwood_memory.engines.options import RequestOptions
from draftwood_memory.engines.policy import RequestPolicy, SettingsPolicy
from draftwood_memory.engines.session import Session, SessionRequest, Step
from draftwood_memory.memory import Memory
from draftwood_memory.settings.memory_settings import MemorySettings
from draftwood_strategies import Strategy, create
from draftwood_strategies.base import Readable
from draftwood_strategies.budgeting.chains import worthwhile_chains
from draftwood_strategies.budgeting.draft_account import DraftAccount, DraftCostModel, step_all
from draftwood_strategies.budgeting.guarded_batches import observe_all, propose_all
from draftwood_strategies.budgeting.guarded_drafter import GuardedDrafter
from draftwood_strategies.budgeting.prompt_indexing import IndexingBudget
from draftwood_strategies.budgeting.served_times import ServedStepTimes
from draftwood_strategies.registry import warm_up

_log = logging.getLogger("draftwood")

_REST_SECONDS = 0.05
"""Without a step, after which the engine rests. It bounds how late the last answers reach other replicas. Not tuned."""
_PUBLISH_SECONDS = 1.0
"""Between two looks at the figures, as between two reports of the server's engine."""
_COST_MODELS = 4096
"""Tenants and strategies whose cost model is remembered; the least recently used one is dropped."""


class Row(NamedTuple):
    """A request in the engine's step.

    Attributes:
        tokens: int32[n] or another type of whole numbers: its prompt and all that it wrote, this step's tokens too.
        prompt: tokens of its prompt.
        room: how many tokens may be drafted; 0 or less for none.
        options: what the request carries, read when it is seen first.
        writes: False while its prompt is not read to its end.
        stops: tokens that end it.
    """

    request_id: str
    tokens: np.ndarray[Any, np.dtype[Any]]
    prompt: int
    room: int
    options: Mapping[str, Any] | None
    writes: bool = True
    stops: Collection[int] = ()


ChargedDraft: TypeAlias = tuple[DraftAccount, int, int]
"""Of a draft that a step verified: whose account is charged, and how many tokens were accepted and drafted."""


class EngineDrafts:
    """Drafts for all requests of one engine.

    Args:
        memory: of the engine's model; `close` stops it.
        policy: decides how requests are drafted for.
        vocab_size: draft tokens are below it.
        longest: tokens of a chain, at most.
        is_live: whether the engine still knows a request, running or not. Called from two threads.
        publish: takes the figures each second, on a thread of its own; None for nobody.
        tell: is told after each step of the requests that wrote in it, and have the chain that was drafted for them.

    Attributes:
        failing: the latest step has no drafts since something raised. Set by who calls `step`.
    """

    _session_class: type[Session] = Session

    def __init__(
        self,
        memory: Memory,
        settings: MemorySettings,
        policy: RequestPolicy,
        vocab_size: int,
        longest: int,
        is_live: Callable[[str], bool],
        publish: Callable[[list[Point]], None] | None = None,
        tell: Callable[[SequenceOf[Session]], None] = lambda sessions: None,
    ) -> None:
        self._policy = policy
        self._tell = tell
        self.times = ServedStepTimes()
        self.failures: Counter[str] = Counter()
        self.sessions: dict[str, Session] = {}
        self.failing = False
        self._memory = memory
        self._settings = settings
        self._vocab_size = vocab_size
        self._longest = longest
        self._is_live = is_live
        self._cost_model = lru_cache(_COST_MODELS)(lambda *drafts: DraftCostModel())
        self._blank = lru_cache(64)(create)
        self._refused: set[str] = set()
        self._tasks: deque[Callable[[], None]] = deque()
        self._figures = Figures()
        self._publish = publish
        self._published_at = 0.0
        self._exclusion = Exclusion()
        self._closed = threading.Event()
        self._stepped_at = 0.0
        self._resting = threading.Thread(target=self._rest, name="draftwood", daemon=True)

    def start(self) -> None:
        """Compiles, and follows the store from now on. Called by the engine's thread."""
        if self._settings.strategy != "none":
            self._exclusion.run(lambda: warm_up(self._settings.strategy))
        self._warm_up()
        self._memory.start(self._between_steps, self._settings.memory_preload, self._settings.strategy)
        self._resting.start()

    def _warm_up(self) -> None:
        """Steps of a made-up request without a tenant: the first step of a real one compiles nothing."""
        text = np.arange(24) % 3
        policy, self._policy = self._policy, SettingsPolicy(self._settings, "")
        for length in range(8, text.shape[0], 2):
            self.step([Row("warm-up", text[:length], 6, 4, None)])
        self._end("warm-up")
        self._policy = policy
        self.times, self._figures = ServedStepTimes(), Figures()

    def step(self, rows: SequenceOf[Row]) -> list[list[int]]:
        """A chain for each row, after the engine's step; an empty one where nothing is drafted.

        Raises:
            TimeoutError: a strategy does not return to the other thread.
        """
        began = time.perf_counter()
        self._exclusion.tell()
        with self._exclusion.held():
            self._run_tasks()
            writing = [(i, row, self._session(row)) for i, row in enumerate(rows) if row.writes]
            if len(self.sessions) > len(writing):
                self._end_others(rows)
            self._observe(began, self._measured(began, rows, writing), writing)
            chains = self._propose(len(rows), writing)
            self._stepped_at = time.perf_counter()
            step = Step(len(rows), len(rows) + sum(map(len, chains)), self._stepped_at)
            for _, _, session in writing:
                session.step = step
            self._tell([session for _, _, session in writing])
        return chains

    def close(self) -> None:
        """Ends all requests, sends what they wrote to the store, and stops. Blocks for seconds at most."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._resting.ident is not None:
            self._resting.join(5.0)
        try:
            with self._exclusion.held():
                self._run_tasks()
                for request_id in [*self.sessions]:
                    self._end(request_id)
        except TimeoutError as error:
            _log.error("the last answers are not learned: %s", error)
        self._exclusion.close()
        self._memory.stop()

    def _session(self, row: Row) -> Session:
        session = self.sessions.get(row.request_id)
        if session is None or session.seen > row.tokens.shape[0]:
            if session is not None:  # the engine has taken tokens back
                self._end(row.request_id)
            session = self.sessions[row.request_id] = self._started(row)
        return session

    def _started(self, row: Row) -> Session:
        try:
            options = self._policy.options_of(row.request_id, row.options)
        except Exception as error:
            self._refuse(str(error))
            options = RequestOptions("", "none", 0, learns=False)
        prompt = row.tokens[: row.prompt].astype(np.int32)
        request = SessionRequest(row.request_id, prompt, options.strategy, options.max_nodes, options.learns)
        session = self._session_class(request, options, seen=row.prompt, stops=row.stops)
        if options.max_nodes == 0:
            return session
        try:
            self._fetch(session)
        except Exception as error:
            self._refuse(f"draftwood_strategy {options.strategy}: {error}")
        return session

    def _fetch(self, session: Session) -> None:
        """Lets a session draft, at once or when its tenant's memory is there."""
        options = session.options
        if not options.tenant:
            strategy = self._blank(options.strategy, **dict(options.strategy_options))
            if not isinstance(strategy, Readable):
                strategy = create(options.strategy, **dict(options.strategy_options))
                session.request = replace(session.request, learns=True)
            self._begin(session, strategy, DraftCostModel())
            return
        use = options.use

        def later(found: Strategy) -> None:
            self._between_steps(lambda: self._begin(session, found, self._cost_model(use.memory, use.key)))

        present = self._memory.fetch(use, later)
        if session.request.learns:
            # Whether or not it is present: a short answer may end before its memory is there.
            session.learning = self._memory.learning(use.memory, request=options.key)
            if session.learning.repeated:  # what is new of its answer is learned when it ends
                session.request = replace(session.request, learns=False)
        if present is not None:
            self._begin(session, present, self._cost_model(use.memory, use.key))

    def _begin(self, session: Session, strategy: Strategy, cost_model: DraftCostModel) -> None:
        if session.ended:
            return
        session.strategy = strategy
        session.drafter = GuardedDrafter(session, self._vocab_size, self.failures, cost_model, self._exclusion.watchdog)
        if session.learning is not None:
            session.learning.strategy = strategy  # its drafter tells it what is written
        if session.output:
            session.drafter.keep(np.concatenate(session.output).tolist())

    def _observe(self, now: float, seconds: float | None, writing: list[tuple[int, Row, Session]]) -> None:
        """Takes what each request wrote in the step that ends now, and took so long if that is known."""
        told, pieces, accounts = [], [], defaultdict[Step, list[ChargedDraft]](list)
        for _, row, session in writing:
            written = row.tokens[session.seen :].astype(np.int32)
            if not written.shape[0]:
                continue
            step, drafted = session.step, len(session.chain)
            accepted = session.take(written, now)
            if session.drafter is None or not session.drafter.active:
                continue
            if step is not None:
                accounts[step].append((session.drafter.account, accepted, drafted))
            told.append(session.drafter)
            pieces.append(written)
        for step, entries in accounts.items():
            self._charge(step, seconds, entries)
        if told:
            begins = np.array([0, *accumulate([piece.shape[0] for piece in pieces])], np.int32)
            observe_all(told, np.concatenate(pieces), begins, None)

    def _charge(self, step: Step, seconds: float | None, accounts: SequenceOf[ChargedDraft]) -> None:
        """Charges drafts with a step that they had, and that took so long if that is known."""
        if not self.times.known(step.rows):
            return
        charged, accepted, drafted = zip(*accounts, strict=True)
        longest = max(drafted)
        without = self.times.between(step.rows, step.tokens - longest, step.tokens)
        verifying = without[-1] - without[longest - np.array(drafted)]
        step_all(
            charged,
            float(without[-1]) if seconds is None else seconds,
            np.array(accepted, np.int32),
            verifying,
            step.rows,
        )

    def _propose(self, rows: int, writing: list[tuple[int, Row, Session]]) -> list[list[int]]:
        chains: list[list[int]] = [[] for _ in range(rows)]
        if self.times.probes(rows):
            return chains
        indexing = IndexingBudget()
        asked = [
            (i, row, session, session.drafter)
            for i, row, session in writing
            if row.room > 0 and session.drafter is not None and session.drafter.ready(indexing)
        ]
        if not asked:
            return chains
        longest = np.minimum([row.room for _, row, _, _ in asked], self._longest).astype(np.int32)
        # The nodes that the best chain is taken from: with more of them it is hardly ever another one.
        budgets = np.minimum([session.request.max_draft_nodes for _, _, session, _ in asked], self._longest)
        trees = propose_all([drafter for _, _, _, drafter in asked], budgets.astype(np.int32))
        found = worthwhile_chains(trees, longest, rows, partial(self.times.between, rows))
        for (i, _, session, _), chain in zip(asked, found.lists(), strict=True):
            chains[i], session.chain = chain, [*chain]  # the engine may shorten its own
            session.stats.drafted += len(chain)
        return chains

    def _measured(self, now: float, rows: SequenceOf[Row], writing: list[tuple[int, Row, Session]]) -> float | None:
        """What the step took that ends now, if it had the rows that were drafted for and no others."""
        step = writing[0][2].step if writing else None
        if step is None or not len(rows) == len(writing) == step.rows:
            return None
        if any(session.step is not step for _, _, session in writing):
            return None
        self._took(step, now - step.began)
        return now - step.began

    def _took(self, step: Step, seconds: float) -> None:
        """Learns from a step that was measured."""
        self.times.observe(step.rows, step.tokens, seconds)

    def _end_others(self, rows: SequenceOf[Row]) -> None:
        """Ends requests that are not in this step and that the engine does not know any more."""
        if len(self.sessions) > len(rows) or any(row.request_id not in self.sessions for row in rows):
            here = {row.request_id for row in rows}
            for request_id in [one for one in self.sessions if one not in here and not self._is_live(one)]:
                self._end(request_id)

    def _end(self, request_id: str) -> None:
        session = self.sessions.pop(request_id)
        try:
            session.close()
        except Exception:
            _log.exception("output of request %r could not be learned", request_id)
        self._figures.ended(session)
        if self._is_live(request_id):
            return  # the process ends, or the engine has taken tokens back
        try:
            self._policy.ended(session)
        except Exception:
            _log.exception("request %r could not be counted", request_id)

    def _refuse(self, problem: str) -> None:
        """A request is not drafted for. Logged once for each problem, as clients repeat theirs."""
        if len(self._refused) < 100 and problem not in self._refused:
            self._refused.add(problem)
            _log.warning("requests are not drafted for: %s", problem)

    def _between_steps(self, task: Callable[[], None]) -> None:
        self._tasks.append(task)

    def _run_tasks(self) -> None:
        while self._tasks:
            try:
                self._exclusion.run(self._tasks.popleft())
            except Exception:
                _log.exception("a task between two steps failed")

    def _publish_figures(self) -> None:
        now = time.monotonic()
        if self._publish is None or now - self._published_at < _PUBLISH_SECONDS:
            return
        self._published_at = now
        with self._exclusion.held():
            points = self._figures.points(
                self.sessions.values(), self._memory.counters(), self._memory.healthy, not self.failing
            )
        try:
            self._publish(points)
        except Exception:
            self._publish = None
            _log.exception("metrics of drafts are not published any more")

    def _rest(self) -> None:
        """While the engine makes no steps: runs tasks, and ends requests that are gone."""
        while not self._closed.wait(_REST_SECONDS):
            with suppress(TimeoutError):  # the engine's thread is in a strategy, and will be interrupted
                self._publish_figures()
                if time.perf_counter() - self._stepped_at < _REST_SECONDS:
                    continue
                with self._exclusion.held():
                    self._run_tasks()
                    for request_id in [one for one in self.sessions if not self._is_live(one)]:
                        self._end(request_id)
