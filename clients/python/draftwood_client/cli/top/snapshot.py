"""What `draftwood top` shows: the samples of all servers, summed. Ratios are None where nothing was counted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from draftwood_client.admin.status import LoadStatus, StoreStatus
from draftwood_client.cli.top.replica import Counts, Key, ReplicaView


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """One server.

    Attributes:
        problem: why it is away.
        kv_used: share of the pages of its KV cache that requests hold.
    """

    target: str
    state: str
    problem: str
    version: str
    model: str
    dtype: str
    runner: str
    uptime: float | None
    running: int
    waiting: int
    tokens_per_second: float
    kv_used: float | None


@dataclass(frozen=True, slots=True)
class TenantRow:
    """One tenant."""

    tenant: str
    running: int
    waiting: int
    tokens_per_second: float
    acceptance_length: float | None
    draft_tokens_per_second: float
    accepted_share: float | None


@dataclass(frozen=True, slots=True)
class StrategyRow:
    """One strategy in one arm.

    Attributes:
        draft_seconds_per_step: in the strategy.
        disabled: requests that it was switched off for, since the servers started.
    """

    strategy: str
    arm: str
    tokens_per_second: float
    acceptance_length: float | None
    draft_tokens_per_step: float | None
    accepted_share: float | None
    draft_seconds_per_step: float | None
    disabled: int


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One source of draft tokens."""

    source: str
    draft_tokens_per_second: float
    accepted_share: float | None


@dataclass(frozen=True, slots=True)
class Load:
    """The load of all servers. Counts of events are since the servers started."""

    running: int
    waiting: int
    max_running: int
    max_waiting: int
    kv_used: float | None
    kv_cached: float | None
    busy: float
    steps_per_second: float
    tokens_per_second: float
    prompt_tokens_per_second: float
    cached_prompt_share: float | None
    acceptance_length: float | None
    draft_tokens_per_step: float | None
    preemptions: int
    engine_restarts: int
    audited: int
    differing: int
    ties: int
    failed_audits: int
    failed_own_texts: int


@dataclass(frozen=True, slots=True)
class Store:
    """The stores of all servers.

    Attributes:
        down: servers whose latest round with it failed.
        lag: the largest, in seconds.
    """

    down: int
    lag: float
    pending_records: int
    dropped_records: int
    late_memories: int
    memories: int
    memory_tokens: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One screen. `load`, `store`, strategies and sources are for operators."""

    time: datetime
    tokens_per_second: float
    replicas: list[ReplicaRow]
    load: Load | None
    strategies: list[StrategyRow]
    sources: list[SourceRow]
    tenants: list[TenantRow]
    store: Store | None


def snapshot(replicas: Sequence[ReplicaView]) -> Snapshot:
    """The latest figures of all servers."""
    rates: defaultdict[Key, Counts] = defaultdict(dict)
    for replica in replicas:
        for key, counts in replica.rates.items():
            _add(rates[key], counts)
    loads = [load for replica in replicas if (load := replica.load) is not None]
    tenants = _tenants(replicas, rates)
    total = _load(loads, rates[("load",)]) if loads else None
    return Snapshot(
        time=datetime.now(UTC),
        tokens_per_second=total.tokens_per_second if total else sum(one.tokens_per_second for one in tenants),
        replicas=[_replica(one) for one in replicas],
        load=total,
        strategies=_strategies(loads, rates),
        sources=[
            SourceRow(key[1], counts["draft_tokens"], _ratio(counts["accepted_tokens"], counts["draft_tokens"]))
            for key, counts in sorted(rates.items(), key=lambda pair: -pair[1].get("accepted_tokens", 0.0))
            if key[0] == "source"
        ],
        tenants=tenants,
        store=_store([load.store for load in loads]) if loads else None,
    )


def _replica(replica: ReplicaView) -> ReplicaRow:
    latest, load, rates = replica.latest, replica.load, replica.rates
    tenants = () if latest is None else latest.tenants
    own = [rates["load",]] if ("load",) in rates else [counts for key, counts in rates.items() if key[0] == "tenant"]
    return ReplicaRow(
        target=replica.target,
        state=replica.state,
        problem=replica.problem,
        version=latest.server_version if latest else "",
        model=latest.model if latest else "",
        dtype=latest.dtype if latest else "",
        runner=latest.runner if latest else "",
        uptime=latest.uptime if latest else None,
        running=load.running if load else sum(one.running for one in tenants),
        waiting=load.waiting if load else sum(one.waiting for one in tenants),
        tokens_per_second=sum(counts["tokens"] for counts in own),
        kv_used=_ratio(load.kv_pages_used, load.kv_pages) if load else None,
    )


def _load(loads: Sequence[LoadStatus], rates: Counts) -> Load:
    def total(of: Callable[[LoadStatus], int]) -> int:
        return sum(map(of, loads))

    def rate(name: str) -> float:
        return rates.get(name, 0.0)

    pages = total(lambda one: one.kv_pages)
    prompt = rate("prompt_tokens") + rate("cached_prompt_tokens")
    return Load(
        running=total(lambda one: one.running),
        waiting=total(lambda one: one.waiting),
        max_running=total(lambda one: one.max_running),
        max_waiting=total(lambda one: one.max_waiting),
        kv_used=_ratio(total(lambda one: one.kv_pages_used), pages),
        kv_cached=_ratio(total(lambda one: one.kv_pages_cached), pages),
        busy=rate("busy") / len(loads),
        steps_per_second=rate("steps"),
        tokens_per_second=rate("tokens"),
        prompt_tokens_per_second=prompt,
        cached_prompt_share=_ratio(rate("cached_prompt_tokens"), prompt),
        acceptance_length=_ratio(rate("tokens"), rate("decode_steps")),
        draft_tokens_per_step=_ratio(rate("draft_tokens"), rate("decode_steps")),
        preemptions=total(lambda one: one.preemptions),
        engine_restarts=total(lambda one: one.engine_restarts),
        audited=total(lambda one: one.audits.audited),
        differing=total(lambda one: one.audits.differing),
        ties=total(lambda one: one.audits.ties),
        failed_audits=total(lambda one: one.audits.failed),
        failed_own_texts=total(lambda one: int(one.own_text_failed)),
    )


def _strategies(loads: Sequence[LoadStatus], rates: dict[Key, Counts]) -> list[StrategyRow]:
    """The one with most tokens first."""
    disabled: defaultdict[tuple[str, str], int] = defaultdict(int)
    for load in loads:
        for one in load.drafting:
            disabled[one.strategy, one.arm] += one.disabled
    rows = []
    for (strategy, arm), count in disabled.items():
        counts = defaultdict(float, rates.get(("drafting", strategy, arm), {}))
        row = StrategyRow(
            strategy=strategy,
            arm=arm,
            tokens_per_second=counts["tokens"],
            acceptance_length=_ratio(counts["tokens"], counts["decode_steps"]),
            draft_tokens_per_step=_ratio(counts["draft_tokens"], counts["decode_steps"]),
            accepted_share=_ratio(counts["accepted_tokens"], counts["draft_tokens"]),
            draft_seconds_per_step=_ratio(counts["draft_time"], counts["decode_steps"]),
            disabled=count,
        )
        rows.append(row)
    return sorted(rows, key=lambda row: (-row.tokens_per_second, row.strategy, row.arm))


def _tenants(replicas: Sequence[ReplicaView], rates: dict[Key, Counts]) -> list[TenantRow]:
    live: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for replica in replicas:
        latest = replica.latest
        for one in () if latest is None else latest.tenants:
            live[one.tenant][0] += one.running
            live[one.tenant][1] += one.waiting
    return [
        _tenant(name, running, waiting, defaultdict(float, rates.get(("tenant", name), {})))
        for name, (running, waiting) in live.items()
    ]


def _tenant(name: str, running: int, waiting: int, counts: Counts) -> TenantRow:
    return TenantRow(
        tenant=name,
        running=running,
        waiting=waiting,
        tokens_per_second=counts["tokens"],
        acceptance_length=_ratio(counts["tokens"], counts["decode_steps"]),
        draft_tokens_per_second=counts["draft_tokens"],
        accepted_share=_ratio(counts["accepted_tokens"], counts["draft_tokens"]),
    )


def _store(stores: Sequence[StoreStatus]) -> Store:
    return Store(
        down=sum(not one.up for one in stores),
        lag=max(one.lag for one in stores),
        pending_records=sum(one.pending_records for one in stores),
        dropped_records=sum(one.dropped_records for one in stores),
        late_memories=sum(one.late_memories for one in stores),
        memories=sum(one.memories for one in stores),
        memory_tokens=sum(one.memory_tokens for one in stores),
        memory_bytes=sum(one.memory_bytes for one in stores),
    )


def _add(total: Counts, counts: Counts) -> None:
    for name, value in counts.items():
        total[name] = total.get(name, 0.0) + value


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
