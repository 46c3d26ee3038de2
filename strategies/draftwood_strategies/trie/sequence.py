"""The live sequences of the trie strategy, and what one compiled call does for all of a step.

The arrays of a sequence keep their addresses until its index grows; a call takes one row of addresses for each.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from draftwood_strategies.native import (
    Float32Array,
    Int32Array,
    Int64Array,
    address_of,
    compiled,
    copy_draft,
    flattened,
    float32s,
    int32_rows,
    int32s,
    int64s,
)
from draftwood_strategies.trie.candidates import COLUMNS, copy_candidate
from draftwood_strategies.trie.expansion import AT_END, PROMPT_END, WRITTEN, expand
from draftwood_strategies.trie.learning import Votes, WritableIndex, learn
from draftwood_strategies.trie.phrase_index import (
    NOWHERE,
    ORDERS,
    TOKENS_PER_BLOCK,
    IndexArrays,
    PhraseIndex,
    append,
    lacks_space,
)
from draftwood_strategies.trie.weights import Weights
from draftwood_strategies.trie.workspace import MOST_ROOTS, TrieDraft, Workspace, empty_draft

_OWN_CAPACITY = 1 << 20
"""Tokens of a sequence's own index; more than any context."""
_EXPECTED = 256
"""Tokens of an answer that its own index has space for at first. Not tuned."""
_NO_TOKENS = np.empty(0, np.int32)

(
    _LOG,
    _LINKS,
    _HEADS,
    _BLOCKS,
    _SLOTS,
    _BUCKETS,
    _RING,
    _OWN_WRITER,
    _WRITER,
    _STATE,
    _FOLLOWED,
    _ROOTS,
    _TOKENS,
    _PARENTS,
    _SCORES,
    _SHARES,
    _SUPPORTS,
    _FOUND,
    _DRAFTED,
    _ROW,
) = range(20)
"""Entries of a row, int64[_ROW]: the addresses of a sequence's arrays, of its own index first, the sizes of that index,
and after the addresses how many candidates and nodes its latest draft has."""


class TrieSequence:
    """One live sequence: its own index, and its latest draft.

    The prompt is written into its index piece by piece (`index_prompt`), and then what the sequence wrote meanwhile.
    Nothing can be drafted before.

    Args:
        writer: its writer in the tenant's memory, int64[2].
        written: how many of its last tokens the memory learns.

    Attributes:
        indexed: the index holds the prompt and all that was written.
    """

    def __init__(self, prompt: Int32Array, writer: Int64Array, written: int) -> None:
        self._prompt, self._position = prompt, 0
        self._kept: list[Int32Array] = []
        self.indexed = False
        self._index: PhraseIndex | None = None
        self._writer = writer
        self._state = np.array([NOWHERE, writer[1], NOWHERE, written], np.int64)
        self._followed = np.array([-1, -1, 0, 0], np.int64)
        self._roots = np.empty((MOST_ROOTS, COLUMNS), np.int32)
        self._draft = empty_draft(0)
        self.nodes = 0
        self._row = np.zeros(_ROW, np.int64)
        kept: list[Any] = [writer, self._state, self._followed, self._roots]
        self._row[_WRITER : _ROOTS + 1] = [*map(address_of, kept)]
        self.address = address_of(self._row)
        """Of its row."""

    @property
    def nbytes(self) -> int:
        """Bytes of its own index."""
        return 0 if self._index is None else self._index.nbytes

    def index_prompt(self, most: int) -> int:
        """Writes up to `most` more tokens of the prompt into its own index; returns how many. Fewer is the end."""
        if self.indexed:
            return 0
        if self._index is None:
            self._index = PhraseIndex(_OWN_CAPACITY, self._prompt.shape[0] + _EXPECTED)
            self._own_writer = self._index.writer()
        piece = self._prompt[self._position : self._position + most]
        self._index.append(self._own_writer, piece)
        self._position += piece.shape[0]
        if piece.shape[0] < most:
            self._state[PROMPT_END] = self._own_writer[0] + 1
            for written in self._kept:
                self._index.append(self._own_writer, written)
            self._state[AT_END] = self._own_writer[0]
            self._prompt, self._kept, self.indexed = _NO_TOKENS, [], True
            self._refer_to(self._index)
        return int(piece.shape[0])

    def keep(self, written: Int32Array) -> None:
        """Keeps what the sequence wrote before its prompt was indexed."""
        self._kept.append(written)
        self._state[WRITTEN] += written.shape[0]

    def reserve(self, tokens: int) -> None:
        """Makes space in its own index, which holds the prompt, for so many more tokens."""
        assert self._index is not None
        self._index.reserve(tokens)
        self._refer_to(self._index)

    def reserve_nodes(self, nodes: int) -> None:
        """Makes space for drafts of so many nodes; the latest draft is lost."""
        self.nodes = max(nodes, 16)
        self._draft = empty_draft(self.nodes)
        self._row[_TOKENS : _SUPPORTS + 1] = [*map(address_of, self._draft)]
        self._row[_DRAFTED] = self._row[_FOUND] = 0

    def _refer_to(self, index: PhraseIndex) -> None:
        arrays = index.arrays
        self._row[_LOG : _BLOCKS + 1] = [*map(address_of, arrays)]
        self._row[_RING], self._row[_OWN_WRITER] = address_of(index.ring), address_of(self._own_writer)
        self._row[_SLOTS], self._row[_BUCKETS] = arrays.log.shape[0], arrays.heads.shape[1]


@flattened
@compiled
def draft_all(
    rows: Int64Array,
    budgets: Int32Array,
    memory: IndexArrays,
    weights: Weights,
    workspace: Workspace,
    branch_length: int,
    tokens: Int32Array,
    parents: Int32Array,
    scores: Float32Array,
    begins: Int32Array,
) -> None:
    """Writes a draft for each sequence.

    Args:
        rows: int64[s], the addresses of the sequences' rows; each has space for its budget.
        budgets: int32[s], the most nodes of each draft.
        tokens, parents, scores, begins: as in `DraftTrees`, with space for all budgets.
    """
    end = 0
    for s in range(rows.shape[0]):
        row = int64s(rows[s], _ROW)
        slots = row[_SLOTS]
        n, found = expand(
            IndexArrays(
                int32s(row[_LOG], slots),
                int32_rows(row[_LINKS], slots, len(ORDERS)),
                int32_rows(row[_HEADS], len(ORDERS), row[_BUCKETS]),
                int32_rows(row[_BLOCKS], slots // TOKENS_PER_BLOCK, 3),
            ),
            memory,
            weights,
            workspace,
            int64s(row[_STATE], 4),
            int64s(row[_FOLLOWED], 4),
            branch_length,
            TrieDraft(
                int32s(row[_TOKENS], budgets[s]),
                int32s(row[_PARENTS], budgets[s]),
                float32s(row[_SCORES], budgets[s]),
                float32s(row[_SHARES], budgets[s]),
                int32s(row[_SUPPORTS], budgets[s]),
            ),
        )
        row[_DRAFTED], row[_FOUND] = n, found
        roots = int32_rows(row[_ROOTS], found, COLUMNS)
        for j in range(found):
            copy_candidate(workspace.roots, j, roots, j)
        copy_draft(row[_TOKENS], row[_PARENTS], row[_SCORES], n, tokens, parents, scores, end)
        end += n
        begins[s + 1] = end


@flattened
@compiled
def next_without_space(rows: Int64Array, begins: Int32Array, first: int) -> int:
    """The next sequence, from `first` on, whose own index must grow before it takes what was written; -1 for none."""
    for s in range(first, rows.shape[0]):
        row = int64s(rows[s], _ROW)
        if lacks_space(int64s(row[_RING], 3), row[_SLOTS], begins[s + 1] - begins[s]):
            return s
    return -1


@flattened
@compiled
def learn_all(
    rows: Int64Array,
    accepted: Int32Array,
    begins: Int32Array,
    memory: IndexArrays,
    memory_ring: Int64Array,
    remember: bool,
    start: Int32Array,
    weights: Weights,
    branch_length: int,
    votes: Votes,
) -> None:
    """For each sequence, learns from its latest draft, and writes what it wrote into its own index and the memory.

    Args:
        rows: as in `draft_all`; the indexes have space.
        accepted, begins: as in `BatchStrategy.observe_all`.
        remember: write into the memory.
        start: int32[1], the start mark, which comes before the first token of a sequence in the memory.
    """
    for s in range(rows.shape[0]):
        row = int64s(rows[s], _ROW)
        slots, drafted = row[_SLOTS], row[_DRAFTED]
        written = accepted[begins[s] : begins[s + 1]]
        writer, own_writer, state = int64s(row[_WRITER], 2), int64s(row[_OWN_WRITER], 2), int64s(row[_STATE], 4)
        if remember and writer[0] < 0:
            append(memory, memory_ring, writer, start)
        learn(
            WritableIndex(
                IndexArrays(
                    int32s(row[_LOG], slots),
                    int32_rows(row[_LINKS], slots, len(ORDERS)),
                    int32_rows(row[_HEADS], len(ORDERS), row[_BUCKETS]),
                    int32_rows(row[_BLOCKS], slots // TOKENS_PER_BLOCK, 3),
                ),
                int64s(row[_RING], 3),
                own_writer,
            ),
            WritableIndex(memory, memory_ring, writer),
            remember,
            weights,
            int64s(row[_FOLLOWED], 4),
            int32_rows(row[_ROOTS], row[_FOUND], COLUMNS),
            TrieDraft(
                int32s(row[_TOKENS], drafted),
                int32s(row[_PARENTS], drafted),
                float32s(row[_SCORES], drafted),
                float32s(row[_SHARES], drafted),
                int32s(row[_SUPPORTS], drafted),
            ),
            written,
            branch_length,
            votes,
        )
        row[_DRAFTED] = row[_FOUND] = 0
        state[AT_END] = own_writer[0]
        state[WRITTEN] += written.shape[0]
