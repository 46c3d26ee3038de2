"""In the place of `draftwood_strategies.device.trie`, on CPU tensors and in Python: a draft goes on as the text did
after the latest earlier occurrence of the last tokens, in the row's own text or else in its tenant's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

SURVIVAL = 0.9
"""Of each further token of a draft."""
_CONTEXT = 3
"""Tokens that are looked for, then one less."""


@dataclass(frozen=True)
class DeviceSizes:
    rows: int
    row_tokens: int
    tenants: int
    tenant_tokens: int
    nodes: int
    depth: int

    @property
    def nbytes(self) -> int:
        return 4 * (self.rows * self.row_tokens + self.tenants * self.tenant_tokens)


@dataclass
class _Row:
    tenant: str
    learns: bool
    text: list[int]
    run: list[int] | None = None
    """Its part of the tenant's texts."""
    writes: bool = False


class DeviceTrie:
    """Attributes: `rows` by index, texts of `tenants`, and `calls`, the names of what was called."""

    def __init__(self, sizes: DeviceSizes, device: Any, options: Any = None) -> None:
        if sizes.rows > 1024:
            raise ValueError(f"rows={sizes.rows} need {sizes.nbytes} bytes")
        self.sizes = sizes
        self.rows: dict[int, _Row] = {}
        self.tenants: dict[str, list[list[int]]] = {}
        self.calls: list[str] = []

    def begin(self, row: int, tenant: str, learns: bool = True) -> None:
        assert row not in self.rows
        assert 0 <= row < self.sizes.rows
        self.rows[row] = _Row(tenant, learns, [])
        self.calls.append("begin")

    def end(self, row: int) -> None:
        del self.rows[row]
        self.calls.append("end")

    def append_prompts(self, rows: torch.Tensor, tokens: torch.Tensor, offsets: torch.Tensor) -> None:
        assert rows.dtype == tokens.dtype == offsets.dtype == torch.int32
        ends = offsets.tolist()
        for i, row in enumerate(rows.tolist()):
            self.rows[row].text += tokens[ends[i] : ends[i + 1]].tolist()
        self.calls.append("append_prompts")

    def begin_outputs(self, rows: torch.Tensor) -> None:
        assert rows.dtype == torch.int32
        for row in rows.tolist():
            self.rows[row].writes = True

    def learn(self, rows: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor) -> None:
        assert rows.dtype == tokens.dtype == counts.dtype == torch.int32
        for row, wrote, count in zip(rows.tolist(), tokens.tolist(), counts.tolist(), strict=True):
            if row < 0 or count == 0:
                continue
            live = self.rows[row]
            assert live.writes
            live.text += wrote[:count]
            if live.learns and live.tenant:
                if live.run is None:
                    live.run = []
                    self.tenants.setdefault(live.tenant, []).append(live.run)
                live.run += wrote[:count]
        self.calls.append("learn")

    def propose_chains(self, rows: Any, lengths: Any, out_tokens: Any, out_scores: Any, out_counts: Any) -> None:
        assert rows.dtype == lengths.dtype == out_tokens.dtype == out_counts.dtype == torch.int32
        assert out_scores.dtype == torch.float32
        for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
            chain = [] if row < 0 else self._chain(self.rows[row])[:length]
            out_counts[i] = len(chain)
            out_tokens[i, : len(chain)] = torch.tensor(chain, dtype=torch.int32)
            out_scores[i, : len(chain)] = SURVIVAL ** torch.arange(1, len(chain) + 1)
        self.calls.append("propose_chains")

    def import_runs(self, tenant: str, runs: Sequence[np.ndarray[Any, Any]]) -> None:
        self.tenants.setdefault(tenant, []).extend(run.tolist() for run in runs)
        self.calls.append("import_runs")

    def purge(self, tenant: str) -> None:
        self.tenants.pop(tenant, None)
        for row in self.rows.values():
            row.run = None if row.tenant == tenant else row.run
        self.calls.append("purge")

    def _chain(self, row: _Row) -> list[int]:
        """What follows the row's last tokens elsewhere."""
        texts = [row.text, *self.tenants.get(row.tenant, [])]
        for count in range(min(_CONTEXT, len(row.text)), 0, -1):
            end = row.text[-count:]
            for text in texts:
                for at in range(len(text) - 1, count - 1, -1):
                    if text[at - count : at] == end:
                        return text[at:]
        return []
