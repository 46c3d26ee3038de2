"""Drafts for the rows of an engine's step, from tenants' memories.

All is called by the engine's thread, after each of its steps, and by a thread of this module while the engine rests: it
ends requests that are gone, lets strategies learn and publishes metrics. They exclude each other. Nothing here waits
for a store, and a call into a strategy is interrupted if it does not return.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import Generic, TypeAlias, TypeVar

import numpy as np

from draftwood_memory.engines.draft_metrics import DataPoint, DraftMetrics
from draftwood_memory.engines.exclusion import BusyError, Exclusion
from draftwood_memory.engines.forms.base import ChargedDraft, DecodeRow, DraftForm
from draftwood_memory.engines.policy import RequestPolicy, SettingsPolicy
from draftwood_memory.engines.session import Row, Session, Step
from draftwood_memory.engines.sessions import Sessions
from draftwood_memory.memory import Memory
from draftwood_memory.settings.memory_settings import MemorySettings
from draftwood_strategies.budgeting.guarded_batches import observe_all
from draftwood_strategies.budgeting.guarded_drafter import IndexingBudget
from draftwood_strategies.registry import strategy_names, warm_up

_log = logging.getLogger("draftwood")

_REST_SECONDS = 0.05
"""Seconds without a step after which the engine is idle. Bounds how late the last answers reach other replicas."""
_PUBLISH_SECONDS = 1.0
"""Interval in which metrics are published, as the server's engine reports."""
MAX_FAILURES, PAUSE_SECONDS = 3, 60.0
"""Steps in a row in which drafting raised, after which it pauses for so long: errors are not logged in each step."""
_INDEXED_TOKENS = 1 << 15
"""Tokens of prompts that are indexed in a step, which engines read in chunks of thousands: 3 to 11 ms, 29 ms for jacobi
(docs/decisions, "Prompts are indexed in pieces")."""

Drafts = TypeVar("Drafts")
Publish: TypeAlias = Callable[[list[DataPoint]], None]
DraftListener: TypeAlias = Callable[[SequenceOf[Session]], None]


class EngineDrafts(Generic[Drafts]):
    """Drafts for all requests of one engine.

    Args:
        memory: of the engine's model; `close` stops it.
        policy: decides how requests are drafted for.
        vocab_size: draft tokens are below it.
        form: of the drafts, chains or trees.
        is_live: whether the engine still knows a request, running or not. Called from two threads.
        publish: takes the metrics each second, on a thread of its own; None for nobody.
        on_drafts: called after each step with the requests that wrote in it, with the draft made for each.

    Attributes:
        sessions: the engine's live requests.
        failing: the latest step has no drafts since something raised.
    """

    def __init__(
        self,
        memory: Memory,
        settings: MemorySettings,
        policy: RequestPolicy,
        vocab_size: int,
        form: DraftForm[Drafts],
        is_live: Callable[[str], bool],
        publish: Publish | None = None,
        on_drafts: DraftListener = lambda sessions: None,
    ) -> None:
        self.memory = memory
        self.failing = False
        self._exclusion = Exclusion()
        self.sessions = Sessions(
            memory, policy, vocab_size, self._exclusion, form.session_class, form.before_end, is_live
        )
        self._settings = settings
        self._form = form
        self._publish = publish
        self._on_drafts = on_drafts
        self._failures, self._paused_until = 0, -float("inf")
        self._published_at = 0.0
        self._stepped_at = 0.0
        self._closed = threading.Event()
        self._resting = threading.Thread(target=self._rest, name="draftwood", daemon=True)

    def start(self) -> None:
        """Compiles, and follows the store from now on. Called by the engine's thread."""
        for name in strategy_names():  # requests may name any, and compilation would hold up a step
            try:
                self._exclusion.run(partial(warm_up, name))
            except Exception:
                _log.exception("strategy %r cannot draft", name)
        self._warm_up()
        self.memory.start(self.sessions.between_steps, self._settings.memory_preload, self._settings.strategy)
        self._resting.start()

    def step(self, rows: SequenceOf[Row]) -> Drafts:
        """The drafts of the rows, after the engine's step.

        Raises:
            BusyError: the other thread is in a strategy.
        """
        began = time.perf_counter()
        self._exclusion.warn_if_uninterruptible()
        with self._exclusion.held_for_step():
            self.sessions.run_tasks()
            decoding = [DecodeRow(i, row, self.sessions.of(row)) for i, row in enumerate(rows) if row.decodes]
            indexing = IndexingBudget(_INDEXED_TOKENS)
            self._index_prompts(rows, indexing)
            if len(self.sessions) > len(decoding):
                self.sessions.end_gone(rows)
            self._observe(began, self._measured(began, rows, decoding), decoding)
            drafts = self._form.propose(len(rows), decoding, indexing)
            sessions = [one.session for one in decoding]
            self._stepped_at = time.perf_counter()
            step = Step(len(rows), len(rows) + sum(len(one.chain) for one in sessions), self._stepped_at)
            for session in sessions:
                session.step = step
            self._on_drafts(sessions)
        return drafts

    def attempt(self, rows: Callable[[], SequenceOf[Row]]) -> Drafts | None:
        """As `step`, but returns None if something raises: the next step of the engine then has no drafts. After
        `MAX_FAILURES` such steps in a row none has for `PAUSE_SECONDS`. Never raises."""
        if time.monotonic() < self._paused_until:
            return None
        try:
            drafts = self.step(rows())
        except BusyError as error:
            if not self.failing:
                _log.warning("steps are not drafted for: %s", error)
            self.failing = True
            return None
        except Exception as error:
            self._fail(error)
            return None
        self.failing, self._failures = False, 0
        return drafts

    def _fail(self, error: Exception) -> None:
        self.failing = True
        self._failures += 1
        if self._failures < MAX_FAILURES:
            _log.warning("a step is not drafted for: %s: %s", type(error).__name__, error)
            return
        self._failures, self._paused_until = 0, time.monotonic() + PAUSE_SECONDS
        text = "nothing is drafted for %.0f s, since %d steps in a row failed"
        _log.error(text, PAUSE_SECONDS, MAX_FAILURES, exc_info=error)

    def _index_prompts(self, rows: SequenceOf[Row], indexing: IndexingBudget) -> None:
        """While the engine reads prompts, their memories are loaded and they are indexed, so that the first token of
        each is drafted for."""
        for row in rows:
            if row.decodes or not 0 < row.prompt <= row.tokens.shape[0]:
                continue
            session = self.sessions.get(row.request_id) or self.sessions.begin(row)
            if session.drafter is not None and indexing.left > 0:
                session.drafter.index_ahead(indexing, indexing.left)

    def points(self) -> list[DataPoint]:
        """All metrics as of now."""
        with self._exclusion.held():
            counters, healthy = self.memory.counters(), self.memory.healthy
            return self.sessions.metrics.points(self.sessions.values(), counters, healthy, not self.failing)

    def close(self) -> None:
        """Ends all requests, sends what they wrote to the store, and stops. Blocks for seconds at most."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._resting.ident is not None:
            self._resting.join(5.0)
        try:
            with self._exclusion.held():
                self.sessions.run_tasks()
                self.sessions.end_all()
        except TimeoutError as error:
            _log.error("the last answers are not learned: %s", error)
        self._exclusion.close()
        self.memory.stop()

    def _warm_up(self) -> None:
        """Steps of a made-up request without a tenant: the first step of a real one compiles nothing."""
        text = np.arange(24) % 3
        policy, self.sessions.policy = self.sessions.policy, SettingsPolicy(self._settings, "")
        for length in range(8, text.shape[0], 2):
            self.step([Row("warm-up", text[:length], 6, 4, None)])
        self.sessions.end_all()
        self.sessions.policy, self.sessions.metrics = policy, DraftMetrics()
        self._form.reset()

    def _observe(self, now: float, seconds: float | None, decoding: list[DecodeRow]) -> None:
        """Records what each request wrote in the step that ends now, which took `seconds` if that is known."""
        drafters, pieces, drafts = [], [], defaultdict[Step, list[ChargedDraft]](list)
        for _, row, session in decoding:
            written = row.tokens[session.seen :].astype(np.int32)
            if not written.shape[0]:
                continue
            step, drafted = session.step, len(session.chain)
            accepted = session.advance(written, now)
            if session.drafter is None or not session.drafter.active:
                continue
            if step is not None:
                drafts[step].append(ChargedDraft(session.drafter.account, accepted, drafted))
            drafters.append(session.drafter)
            pieces.append(written)
        for step, of_step in drafts.items():
            self._form.charge(step, seconds, of_step)
        if drafters:
            offsets = np.array([0, *accumulate([piece.shape[0] for piece in pieces])], np.int32)
            observe_all(drafters, np.concatenate(pieces), offsets, None)

    def _measured(self, now: float, rows: SequenceOf[Row], decoding: list[DecodeRow]) -> float | None:
        """Seconds of the step that ends now; None unless its rows are exactly those that were drafted for."""
        step = decoding[0].session.step if decoding else None
        if step is None or not len(rows) == len(decoding) == step.rows:
            return None
        if any(one.session.step is not step for one in decoding):
            return None
        self._form.record_step_time(step, now - step.began)
        return now - step.began

    def _publish_metrics(self) -> None:
        now = time.monotonic()
        if self._publish is None or now - self._published_at < _PUBLISH_SECONDS:
            return
        self._published_at = now
        points = self.points()
        try:
            self._publish(points)
        except Exception:
            self._publish = None
            _log.exception("metrics of drafts are not published any more")

    def _rest(self) -> None:
        """While the engine makes no steps: runs tasks, and ends requests that are gone."""
        while not self._closed.wait(_REST_SECONDS):
            with suppress(TimeoutError):  # the engine's thread is in a strategy, and will be interrupted
                self._publish_metrics()
                if time.perf_counter() - self._stepped_at < _REST_SECONDS:
                    continue
                while self.sessions.has_tasks and not self._exclusion.wanted:
                    with self._exclusion.held():
                        self.sessions.run_tasks(1)
                with self._exclusion.held():
                    self.sessions.end_gone()
