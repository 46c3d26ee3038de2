"""Drafts for the rows of another engine's steps, from tenants' memories: `DraftEngine` with what such an engine lacks.

All is called by the engine's thread, after each of its steps, and by a thread of this module while the engine rests: it
ends requests that are gone, lets strategies learn and publishes metrics. They exclude each other. Nothing here waits
for a store, and a call into a strategy is interrupted if it does not return.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np

from draftwood_memory.engines.draft_metrics import DataPoint
from draftwood_memory.engines.exclusion import BusyError, Exclusion
from draftwood_memory.engines.policy import RequestPolicy, SettingsPolicy
from draftwood_memory.engines.session import Row, Session, Step
from draftwood_memory.engines.sessions import Sessions
from draftwood_memory.memory import Memory
from draftwood_memory.settings import MemorySettings
from draftwood_strategies.arrays import Int32Array, segment_sizes
from draftwood_strategies.draft import DraftTrees
from draftwood_strategies.draft_engine.engine import Ask, DraftEngine, Verifies
from draftwood_strategies.draft_engine.guard import IndexingBudget
from draftwood_strategies.draft_engine.online_step_times import OnlineStepTimes
from draftwood_strategies.draft_engine.step_times import StepSize, StepTimes
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
(docs/decisions/first-tokens.md)."""

Publish: TypeAlias = Callable[[list[DataPoint]], None]
DraftListener: TypeAlias = Callable[[SequenceOf[Session]], None]


@dataclass(frozen=True)
class Host:
    """The engine that is drafted for.

    Attributes:
        verifies: what of a draft.
        nodes: draft nodes of a row, at most.
        is_live: whether it still knows a request, running or not. Called from two threads.
        step_times: makes the cost model of its steps.
        output_of: int32[n], what a request wrote, once it has ended; None before, or if that is not known.
    """

    verifies: Verifies
    nodes: int
    is_live: Callable[[str], bool]
    step_times: Callable[[], StepTimes] = OnlineStepTimes
    output_of: Callable[[str], Int32Array | None] = lambda request_id: None


class DecodeRow(NamedTuple):
    """A request that wrote in the engine's step, which is row `row_index` of it."""

    row_index: int
    row: Row
    session: Session


class EngineDrafts:
    """Drafts for all requests of one engine.

    Args:
        memory: of the engine's model; `close` stops it.
        policy: decides how requests are drafted for.
        vocab_size: draft tokens are below it.
        host: what the engine verifies, and what it tells of its requests.
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
        host: Host,
        publish: Publish | None = None,
        on_drafts: DraftListener = lambda sessions: None,
    ) -> None:
        self.memory = memory
        self.failing = False
        self._exclusion = Exclusion()
        self._settings = settings
        self._host = host
        self._vocab_size = vocab_size
        self._steps = 0
        self._restart(policy)
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

    def _restart(self, policy: RequestPolicy) -> None:
        """Begins with no steps and no requests."""
        host = self._host
        self._drafts = DraftEngine(self._vocab_size, host.verifies, host.step_times(), self._exclusion.watchdog)
        self.sessions = Sessions(self.memory, policy, self._drafts, self._exclusion, host.is_live, host.output_of)

    def step(self, rows: SequenceOf[Row]) -> DraftTrees:
        """A draft for each row, after the engine's step: a tree, or a chain if the engine verifies chains.

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
            drafts = self._propose(rows, decoding, indexing)
            self._stepped_at = time.perf_counter()
            self._steps += 1
            size = StepSize(len(rows) + drafts.tokens.shape[0], len(rows))
            step = Step(self._steps, size, self._stepped_at)
            sessions = [decoded.session for decoded in decoding]
            for session in sessions:
                session.step = step
            self._on_drafts(sessions)
        return drafts

    def _propose(self, rows: SequenceOf[Row], decoding: SequenceOf[DecodeRow], indexing: IndexingBudget) -> DraftTrees:
        """The drafts of the next step."""
        asks, longest = [], np.zeros(len(rows), np.int32)
        probes = self._drafts.probes(len(rows))
        for index, row, session in decoding:
            longest[index] = 0 if probes else max(min(row.max_draft_tokens, self._host.nodes), 0)
            if longest[index] and session.drafter is not None and session.drafter.ready(indexing):
                asks.append(Ask(index, session, min(session.request.drafting.max_nodes, self._host.nodes)))
        trees = self._drafts.propose(asks, len(rows), len(rows))
        if self._host.verifies is Verifies.CHAINS:
            trees = self._drafts.worthwhile(trees, len(rows), longest=longest).trees
        sizes = segment_sizes(trees.offsets).tolist()
        for index, _, session in decoding:
            session.drafted = sizes[index]
        return trees

    def attempt(self, rows: Callable[[], SequenceOf[Row]]) -> DraftTrees | None:
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

    @property
    def failures(self) -> Counter[str]:
        """For each strategy, by name, how many requests it was switched off for."""
        return self._drafts.failures

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
        self._restart(policy)

    def _observe(self, now: float, seconds: float | None, decoding: list[DecodeRow]) -> None:
        """Records what each request wrote in the step that ends now, which took `seconds` if that is known."""
        sessions, pieces = list[Session](), []
        by_step = defaultdict[Step, list[tuple[Session, int]]](list)
        for _, row, session in decoding:
            written = row.tokens[session.seen :].astype(np.int32)
            if not written.shape[0]:
                continue
            accepted = session.advance(written, now)
            if session.drafter is None or not session.drafter.active:
                continue
            if session.step is not None:
                by_step[session.step].append((session, accepted))
            sessions.append(session)
            pieces.append(written)
        for step, drafted in by_step.items():
            accepted_of = np.array([accepted for _, accepted in drafted], np.int32)
            self._drafts.observe([session for session, _ in drafted], accepted_of, step.size, seconds)
        if sessions:
            offsets = np.array([0, *accumulate([piece.shape[0] for piece in pieces])], np.int32)
            self._drafts.learn(sessions, np.concatenate(pieces), offsets)

    def _measured(self, now: float, rows: SequenceOf[Row], decoding: list[DecodeRow]) -> float | None:
        """Seconds of the step that ends now; None unless its rows are exactly those that were drafted for."""
        step = decoding[0].session.step if decoding else None
        if step is None or not len(rows) == len(decoding) == step.size.sequences:
            return None
        if any(decoded.session.step != step for decoded in decoding):
            return None
        self._drafts.observe_step(step.size, now - step.began)
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
