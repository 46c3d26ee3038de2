"""The mixture of a trie's drafts with successor tables, on the device: the tables and weights of its tenants are in the
trie's arena, behind its own weights, and come and go with them.
"""

from __future__ import annotations

import numpy as np
import torch

from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.device.arena import TAIL, TOPS_AT
from draftwood_strategies.device.calls import VerifiedTrees, learn_mixture, mix
from draftwood_strategies.device.trie import DeviceDrafts, DeviceTrie
from draftwood_strategies.successors import NOWHERE, ORDERS, SuccessorTable, has_layout


class DeviceMixture:
    """What the rows of a trie mix. Rows without a region have the model's table alone, and weights as they are before
    any traffic.

    Args:
        trie: in whose arena; of sizes with `contexts`.
    """

    def __init__(self, trie: DeviceTrie) -> None:
        self._trie, self._layout = trie, trie.layout
        self._rows = trie.arena[self._layout.mixed : self._layout.scratch]
        self._rows = self._rows[: trie.layout.sizes.rows * self._layout.mixed_size].view(trie.layout.sizes.rows, -1)
        self._model_rows: Int32Array | None = None
        self._model_table = trie.uploaded(SuccessorTable(SuccessorTable.LEAST).rows)

    def set_model_table(self, rows: Int32Array) -> None:
        """As `UsesModelTable.set_model_table`, for all tenants of the arena; ignored if it has another layout."""
        if rows is not self._model_rows and has_layout(rows):
            self._model_rows, self._model_table = rows, self._trie.uploaded(rows)

    def begin(self, row: int, prompt: Int32Array) -> None:
        """Begins a sequence in a row, behind `DeviceTrie.begin`."""
        numbers = np.zeros(TOPS_AT, np.int32)
        known = prompt[-ORDERS:][::-1]
        numbers[TAIL : TAIL + ORDERS] = NOWHERE
        numbers[TAIL : TAIL + known.shape[0]] = known
        self._rows[row, :TOPS_AT].copy_(self._trie.uploaded(numbers))

    def learn(
        self,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        counts: torch.Tensor,
        sources: torch.Tensor,
        trees: VerifiedTrees,
    ) -> None:
        """Learns from the rows' latest drafts and from what was verified; before `DeviceTrie.learn`.

        Args:
            rows, tokens, counts: as there.
            sources: int32[b], of each row the number of its verified tree.
        """
        if rows.shape[0]:
            arena, table = self._trie.arena, self._model_table
            learn_mixture(arena, self._layout, table, rows, tokens, counts, sources, trees)

    def propose(self, rows: torch.Tensor, budgets: torch.Tensor, out: DeviceDrafts) -> None:
        """Drafts for rows; behind `DeviceTrie.propose` with the same `out`, for those that have a trie, too.

        Args:
            rows: int32[b], each row once, negative for those that `out` keeps the trie's drafts of.
            budgets, out: as there.
        """
        if rows.shape[0]:
            mix(self._trie.arena, self._layout, self._model_table, rows, budgets, out)
