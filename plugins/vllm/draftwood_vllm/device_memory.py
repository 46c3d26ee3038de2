"""Tenants' memories beside drafts on the device: who drafts from what, and what becomes of the answers.

What a request writes reaches the host steps later (`HostCopies`), and its tenant's memory when it has ended, as with
drafts on the host. What a memory learns from the store goes to the device as changes, which the engine applies between
two steps. A memory knows the device as a strategy that only learns, of which a new instance is an empty region: so what
the store brings, purges and evictions reach the device by the ways that tries on the host have.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from draftwood_memory.engines.draft_metrics import DraftMetrics
from draftwood_memory.engines.drafts import DraftListener, Publish
from draftwood_memory.engines.options import RequestOptions
from draftwood_memory.engines.policy import RequestPolicy
from draftwood_memory.engines.session import Session, SessionRequest
from draftwood_memory.memory import Memory, StrategyUse
from draftwood_memory.records import Int32Array
from draftwood_memory.resident import StrategyKey
from draftwood_memory.store.naming import MemoryName
from draftwood_strategies.base import Drafter, DraftStats
from draftwood_strategies.drafting import NO_DRAFTS
from draftwood_strategies.registry import register
from draftwood_vllm.device_drafts import Decision, Load, Purge
from draftwood_vllm.host_copies import HostCopies

_log = logging.getLogger("draftwood")

_REST_SECONDS = 0.05
"""As `draftwood_memory.engines.drafts` rests."""
_PUBLISH_SECONDS = 1.0
_LOAD_TOKENS = 1 << 16
"""Loaded between two steps, so that a large memory holds up none of them. Not tuned."""
_MAX_REFUSALS = 100
_CLOSING_SECONDS = 2.0


STRATEGY = "_device"
"""Not for requests."""
Changes: TypeAlias = "SimpleQueue[tuple[str, Int32Array | None]]"
"""Names of regions, each with a text that it learns, or None where it is empty from now on."""


class _Region:
    """A region of the device. Any thread."""

    top_k = 0

    def __init__(self, changes: Changes, region: str) -> None:
        self._changes, self._region = changes, region
        changes.put((region, None))

    def start(self, prompt: Int32Array) -> Drafter:
        """Raises RuntimeError: nothing is drafted on the host."""
        raise RuntimeError(f"strategy {STRATEGY!r} drafts on the device alone")

    def learn(self, tokens: Int32Array) -> None:
        """Learns a whole sequence, int32[n]."""
        self._changes.put((self._region, tokens))


class Regions:
    """Makes the strategy.

    Attributes:
        changes: of the process's engine, of which there is one.
    """

    def __init__(self) -> None:
        self.changes: Changes = SimpleQueue()

    def __call__(self, region: str = "") -> _Region:
        return _Region(self.changes, region)


REGIONS = register(STRATEGY)(Regions())


class Arrival(NamedTuple):
    """A request that the engine reads for the first time.

    Attributes:
        prompt: int32[p]; None if it is not of tokens alone.
        extra_args: what it carries, read by the policy.
        stop_token_ids: tokens that end it.
        max_tokens: the most that it writes; None for no limit.
    """

    request_id: str
    prompt: Int32Array | None
    extra_args: Mapping[str, Any] | None
    stop_token_ids: Collection[int] = ()
    max_tokens: int | None = None


@dataclass(eq=False)
class _Live:
    """A request from its first token to its end.

    Attributes:
        use: of its tenant's memory on the device; None for its own text alone, and without drafts.
        rebuilt: its region was emptied since it began.
    """

    arrival: Arrival
    session: Session
    use: StrategyUse | None = None
    region: str = ""
    rebuilt: bool = False
    drafted: int = 0


class _Ended(NamedTuple):
    live: _Live


class _Resumed(NamedTuple):
    live: _Live
    output: Int32Array


_Sent = list[_Live | None] | _Ended | _Resumed


@dataclass
class _Loading:
    """Texts that wait for the engine."""

    purged: bool = False
    runs: list[Int32Array] = field(default_factory=list)


class DeviceMemory:
    """The memories of an engine that drafts on the device, on the rank that decides.

    Called by the engine's thread, and by a thread of its own that takes in the last answers while the engine rests, and
    publishes metrics. Never waits for the store or for the device.

    Args:
        device: of the tensors of `written`.
        regions: that the device holds at once. Those used longest ago make room; while all are in use, further tenants'
            requests draft from their own text alone.
        publish, on_drafts: as in `EngineDrafts`.
    """

    def __init__(
        self,
        memory: Memory,
        policy: RequestPolicy,
        device: torch.device,
        regions: int,
        publish: Publish | None = None,
        on_drafts: DraftListener = lambda sessions: None,
    ) -> None:
        self.memory = memory
        self.metrics = DraftMetrics()
        self._policy = policy
        self._publish = publish
        self._on_drafts = on_drafts
        self._copies: HostCopies[_Sent] = HostCopies(device)
        self._live: dict[str, _Live] = {}
        self._preempted: set[str] = set()
        self._loading: dict[str, _Loading] = {}
        self._most_regions = regions
        self._regions: dict[str, StrategyUse] = {}  # those used last at the end
        self._settled: set[str] = set()  # with more than the text of requests that run
        self._refused: set[str] = set()
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._published_at = 0.0
        self._resting = threading.Thread(target=self._rest, name="draftwood", daemon=True)
        self._changes: Changes = SimpleQueue()
        REGIONS.changes = self._changes

    def __len__(self) -> int:
        return len(self._live)

    def start(self) -> None:
        """Follows the store from now on."""
        self.memory.start(lambda task: task())
        self._resting.start()

    def join(self, arrival: Arrival, output: Int32Array | None = None) -> Decision:
        """How a request is drafted for that the engine begins, or resumes after it was preempted. Never raises.

        Args:
            output: int32[n], what it has written before.
        """
        with self._lock:
            live = self._live.get(arrival.request_id)
            if live is not None and arrival.request_id in self._preempted:
                self._preempted.discard(arrival.request_id)
                self._copies.mark(_Resumed(live, np.empty(0, np.int32) if output is None else output))
            else:
                if live is not None:  # its prompt has changed
                    self.end(arrival.request_id)
                live = self._live[arrival.request_id] = self._began(arrival)
            request = live.session.request
            drafts = arrival.prompt is not None and request.drafting.strategy != NO_DRAFTS
            learns = request.learns and live.use is not None and _is_current(live)
            return Decision(live.region, learns, request.drafting.max_nodes if drafts else 0)

    def preempt(self, request_id: str) -> None:
        """The engine has taken a request's row; it will join again."""
        with self._lock:
            if request_id in self._live:
                self._preempted.add(request_id)

    def end(self, request_id: str) -> None:
        """A request ended, in whatever way. Its memory learns what it wrote once that has arrived."""
        with self._lock:
            live = self._live.pop(request_id, None)
            self._preempted.discard(request_id)
            if live is not None:
                self._copies.mark(_Ended(live))

    def written(self, request_ids: list[str], written: torch.Tensor) -> None:
        """What the rows of a step wrote: `StepDrafts.written`, on the device. Takes in what has arrived of earlier
        steps."""
        with self._lock:
            self._copies.send(written, [self._live.get(request_id) for request_id in request_ids])
            self.take_in()

    def changes(self) -> list[Load | Purge]:
        """What the device is to apply before the next step, `_LOAD_TOKENS` tokens at most."""
        with self._lock:
            with suppress(Empty):
                while True:
                    region, tokens = self._changes.get_nowait()
                    loading = self._loading.setdefault(region, _Loading())
                    if tokens is None:
                        loading.purged = True
                        loading.runs.clear()
                    elif region in self._regions:
                        loading.runs.append(tokens)
            return [*self._due()] if self._loading else []

    def take_in(self) -> None:
        """Takes in what has arrived from the device."""
        with self._lock:
            for about, copied in self._copies.arrived():
                if isinstance(about, _Ended):
                    self._close(about.live)
                elif isinstance(about, _Resumed):
                    about.live.session.output = [about.output] if about.output.size else []
                    about.live.session.seen = about.live.session.request.prompt.shape[0] + about.output.shape[0]
                elif copied is not None:
                    self._take_step(about, copied)

    def close(self) -> None:
        """Ends all requests, sends what they wrote to the store, and stops. Blocks for seconds at most."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._resting.ident is not None:
            self._resting.join(_CLOSING_SECONDS)
        with self._lock:
            with suppress(RuntimeError):  # the device has failed
                self.take_in()
            for live in [*self._live.values()]:
                self._close(live, counted=False)
            self._live.clear()
        self.memory.stop()

    def _due(self) -> Iterator[Load | Purge]:
        left = _LOAD_TOKENS
        for region, loading in [*self._loading.items()]:
            if loading.purged:
                loading.purged = False
                yield from self._purge(region)
            runs = list[Int32Array]()
            while loading.runs and left > 0:
                left -= int(loading.runs[0].shape[0])
                runs.append(loading.runs.pop(0))
            if runs:
                self._settled.add(region)
                yield Load(region, runs)
            if not loading.runs:
                del self._loading[region]

    def _purge(self, region: str) -> Iterator[Purge]:
        """A region is to have what its memory has; the texts that this is follow. Unless the memory was purged, what
        its requests wrote so far is learned again when they end."""
        drafting = [live for live in self._live.values() if live.region == region]
        muted = [live for live in drafting if not _is_current(live)]
        if not muted and region not in self._settled:
            return
        self._settled.discard(region)
        for live in drafting:
            live.rebuilt = True
        yield Purge(region, [live.arrival.request_id for live in muted])

    def _began(self, arrival: Arrival) -> _Live:
        try:
            options = self._policy.options_of(arrival.request_id, arrival.extra_args)
        except Exception as error:
            self._refuse(str(error))
            options = RequestOptions()
        prompt = np.empty(0, np.int32) if arrival.prompt is None else arrival.prompt
        request = SessionRequest(arrival.request_id, prompt, options.drafting, options.learns)
        stops = arrival.stop_token_ids
        live = _Live(
            arrival,
            Session(request, DraftStats(), options=options, seen=prompt.shape[0], stop_token_ids=stops),
        )
        if options.drafting.max_nodes > 0 and options.tenant and arrival.prompt is not None:
            try:
                self._fetch(live)
            except Exception as error:
                self._refuse(f"tenant's memory: {type(error).__name__}: {error}")
        return live

    def _fetch(self, live: _Live) -> None:
        """Lets the tenant's memory be loaded, for this request and later ones."""
        session, options = live.session, live.session.options
        name = MemoryName(options.tenant, options.arm)
        region = self.memory.naming.tag(name)
        if self._has_room_for(region):
            live.region = region
            live.use = StrategyUse(name, StrategyKey(STRATEGY, (("region", region),)), options.overrides)
            if region not in self._regions:
                self._drop(live.use)  # one that was made late for a request before has filled no region
            self.memory.fetch(live.use, lambda loaded: None)
            self._regions[region] = self._regions.pop(region, live.use)
        if session.request.learns:
            session.learning = self.memory.learning(name, request=options.key)
            if session.learning.repeated:  # what is new of its answer is learned when it ends
                session.request = replace(session.request, learns=False)

    def _has_room_for(self, region: str) -> bool:
        """Whether the device has, or can have, this region; another one makes room."""
        if region in self._regions or len(self._regions) < self._most_regions:
            return True
        used = {live.region for live in self._live.values()}
        unused = next((one for one in self._regions if one not in used), None)
        if unused is None:
            return False
        self._drop(self._regions.pop(unused))
        self._changes.put((unused, None))
        return True

    def _drop(self, use: StrategyUse) -> None:
        """Lets a memory build its region anew when it is asked for."""
        resident = self.memory.residents.get(use.memory)
        if resident is None:
            return
        with resident.lock:
            resident.strategies.pop(use.key, None)
            building = resident.unbuilt.pop(use.key, None)
        if building is not None:
            building.set_result(None)

    def _take_step(self, rows: list[_Live | None], written: np.ndarray[Any, Any]) -> None:
        now, stepped = time.perf_counter(), list[Session]()
        for live, row in zip(rows, written, strict=True):
            count, drafted = int(row[-2]), int(row[-1])
            if live is None or live.session.ended or count <= 0:
                continue
            session = live.session
            session.drafted = live.drafted
            session.advance(row[:count].astype(np.int32), now)
            session.drafted = live.drafted = drafted
            session.stats.proposed_tokens += drafted
            stepped.append(session)
        self._on_drafts(stepped)

    def _close(self, live: _Live, counted: bool = True) -> None:
        session, learning = live.session, live.session.learning
        session.output = _until_its_end(session.output, live.arrival)
        if learning is not None and live.use is not None and session.request.learns and not live.rebuilt:
            # The region has its text. Other replicas, and other arms' strategies, get it.
            learning.strategy = learning.resident.strategies.get(live.use.key)
        self._settled.add(live.region)
        try:
            session.close()
        except Exception:
            _log.exception("output of request %r could not be learned", session.request.request_id)
        self.metrics.ended(session)
        if not counted or not session.output:
            return
        try:
            self._policy.ended(session)
        except Exception:
            _log.exception("request %r could not be counted", session.request.request_id)

    def _refuse(self, problem: str) -> None:
        """A request is not drafted for. Logged once for each problem, as clients repeat theirs."""
        if len(self._refused) < _MAX_REFUSALS and problem not in self._refused:
            self._refused.add(problem)
            _log.warning("requests are not drafted for: %s", problem)

    def _rest(self) -> None:
        while not self._closed.wait(_REST_SECONDS):
            try:
                self.take_in()
                self._publish_metrics()
            except Exception:
                _log.exception("the last answers are taken in later")

    def _publish_metrics(self) -> None:
        now = time.monotonic()
        if self._publish is None or now - self._published_at < _PUBLISH_SECONDS:
            return
        self._published_at = now
        counters, healthy = self.memory.counters(), self.memory.healthy
        with self._lock:
            sessions = [live.session for live in self._live.values()]
            points = self.metrics.points(sessions, counters, healthy, drafting=True)
        try:
            self._publish(points)
        except Exception:
            self._publish = None
            _log.exception("metrics of drafts are not published any more")


def _is_current(live: _Live) -> bool:
    """Whether its memory was not purged since it began; of one that learns nothing that is not known, and plays no
    part."""
    learning = live.session.learning
    return learning is None or learning.resident.is_current(learning.epoch, learning.since)


def _until_its_end(output: list[Int32Array], arrival: Arrival) -> list[Int32Array]:
    """What a request wrote, in pieces, up to the token that ended it: steps that were scheduled by then go on."""
    kept, left = list[Int32Array](), arrival.max_tokens
    for piece in output:
        piece = piece if left is None else piece[: max(left, 0)]
        ends = np.isin(piece, [*arrival.stop_token_ids])
        if ends.any():
            piece = piece[: int(ends.argmax()) + 1]
        if piece.size:
            kept.append(piece)
        if ends.any():
            break
        left = None if left is None else left - int(piece.shape[0])
    return kept
