"""What a server does now, as plain values; fields as in the protocol, times in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class TenantStatus:
    """The requests of one tenant; fields as in the protocol."""

    tenant: str
    running: int
    waiting: int
    tokens: int
    decode_steps: int
    draft_tokens: int
    accepted_tokens: int


@dataclass(frozen=True, slots=True)
class DraftingStatus:
    """The requests of one strategy in one arm; fields as in the protocol, times in seconds."""

    strategy: str
    arm: str
    requests: int
    tokens: int
    decode_steps: int
    draft_tokens: int
    accepted_tokens: int
    draft_time: float
    disabled: int


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """The draft tokens of one source; fields as in the protocol."""

    source: str
    draft_tokens: int
    accepted_tokens: int


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """The store of learned memories; fields as in the protocol, times in seconds."""

    up: bool
    lag: float
    pending_records: int
    dropped_records: int
    late_memories: int
    memories: int
    memory_tokens: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class AuditStatus:
    """Totals of the losslessness audit; fields as in the protocol."""

    audited: int
    differing: int
    ties: int
    failed: int


@dataclass(frozen=True, slots=True)
class LoadStatus:
    """The load of a server; fields as in the protocol, times in seconds."""

    running: int
    waiting: int
    max_running: int
    max_waiting: int
    kv_pages_used: int
    kv_pages_cached: int
    kv_pages: int
    steps: int
    busy: float
    prompt_tokens: int
    cached_prompt_tokens: int
    tokens: int
    decode_steps: int
    preemptions: int
    engine_restarts: int
    draft_tokens: int
    drafting: tuple[DraftingStatus, ...]
    sources: tuple[SourceStatus, ...]
    accepted_by_depth: tuple[int, ...]
    store: StoreStatus
    audits: AuditStatus
    own_text_failed: bool


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """One sample; fields as in the protocol, times in seconds.

    Attributes:
        state: "serving", "restarting", "draining" or "configuration_unknown".
        load: None unless the caller is an operator.
    """

    time: datetime
    uptime: float
    server_version: str
    model: str
    dtype: str
    runner: str
    state: str
    tenants: tuple[TenantStatus, ...]
    load: LoadStatus | None
