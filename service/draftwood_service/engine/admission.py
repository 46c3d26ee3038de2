"""Which requests end so that a new one gets slots when all are taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from draftwood_service.engine.stream import Stream


def to_refuse(
    live: Iterable[Stream], slots: int, tenant: str, max_live: int, weight_of: Callable[[str], float]
) -> list[Stream] | None:
    """Requests to end so that `tenant` gets these slots; None if it has to be refused itself.

    They are of tenants that then still hold at least as much for their weight, and paused or not begun.

    Args:
        max_live: slots that there are.
        weight_of: of a tenant.
    """
    live = [stream for stream in live if not stream.failed]
    held = Counter[str]()
    for stream in live:
        held[stream.tenant] += stream.slots
    missing = held.total() + slots - max_live
    if missing <= 0:
        return []
    share = (held[tenant] + slots) / weight_of(tenant)
    refused = []
    for stream in sorted(live, key=lambda stream: (stream.paused, stream.admitted_at), reverse=True):
        left = held[stream.tenant] - stream.slots
        needed = stream.begun and not stream.paused
        if needed or stream.tenant == tenant or left / weight_of(stream.tenant) < share:
            continue
        held[stream.tenant] = left
        refused.append(stream)
        missing -= stream.slots
        if missing <= 0:
            return refused
    return None
