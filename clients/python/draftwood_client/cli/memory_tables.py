"""`draftwood memory stats` for people: tables whose values have units."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from draftwood_client.cli.admin.tables import cell, console, plain_table
from draftwood_client.memory import MemoryStatistics, TenantMemoryStatistics


def statistics_tables(found: MemoryStatistics) -> None:
    """Prints a table of the memories and, for operators, one of the store."""
    right = ("tokens", "stored", "entries", "index in RAM")
    table = plain_table("tenant", "arm", *right, "", right=right)
    for one in found.tenants:
        table.add_row(*map(cell, _row(one)))
    to = console()
    to.print(table)
    count = len(found.tenants)
    to.print(f"{count:,} {'memory' if count == 1 else 'memories'} of the model with fingerprint {found.fingerprint}")
    if found.store is not None:
        to.print()
        store = plain_table("store", "", right=("",))
        for name, value in asdict(found.store).items():
            store.add_row(*map(cell, _quantity(name, value)))
        to.print(store)


def size(count: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:,.1f} {unit}"
    return f"{count} B"


def _row(one: TenantMemoryStatistics) -> list[str]:
    index = size(one.index_bytes) if one.resident else "not loaded"
    note = "read-only" if one.read_only else ""
    counts = f"{one.tokens:,}", size(one.stored_bytes), f"{one.log_records:,}", index
    return [one.tenant, one.arm or "-", *counts, note]


def _quantity(name: str, value: Any) -> tuple[str, str]:
    """A field of the store's statistics: its name without the unit, and the value with it."""
    words = name.replace("_", " ")
    if isinstance(value, bool):
        return words, "yes" if value else "NO"
    if name.endswith("_bytes"):
        return words.removesuffix(" bytes"), size(value)
    if name == "last_lag":
        return words, f"{1000 * value:,.0f} ms"
    return words, f"{value:,}" if isinstance(value, int) else str(value)
