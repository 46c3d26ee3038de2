"""Fair eviction: what to evict when tenants together need more than a process or a store has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import TypeVar

Item = TypeVar("Item")


def surplus(
    items: SequenceOf[tuple[Item, str, int]], limit: int, kept: Callable[[Item], bool] = lambda _: False
) -> Iterator[Item]:
    """The items to evict, one after the other, until the others fit: of tenants that hold more than their share.

    A share is the limit divided by the tenants that hold something. So no tenant loses anything to another while it
    holds less than that.

    Args:
        items: item, tenant and size, the least recently used first.
        kept: whether an item cannot be evicted.
    """
    held: Counter[str] = Counter()
    for _, tenant, size in items:
        held[tenant] += size
    excess, share = sum(held.values()) - limit, limit / max(1, len(held))
    for item, tenant, size in items:
        if excess <= 0:
            return
        if held[tenant] > share and not kept(item):
            held[tenant] -= size
            excess -= size
            yield item
