"""The model's most probable next tokens by context, as of the last time that it saw the same few tokens.

The adjacency matrix of Token Recycling (arXiv 2408.08696) keeps the k most probable tokens after each single token, as
seen at any node of a verified tree, rejected ones too. Here the contexts of one to `ORDERS` tokens have a row each,
as in prediction by partial matching (PPM); a longer context gets one only once the shorter one is known, so that
memory goes to what comes back. Rows live in a hash table of fixed buckets that grows up to its capacity; then the row
of a bucket that was written longest ago leaves.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import numpy as np

from draftwood_strategies.arrays import Int32Array, Integer
from draftwood_strategies.native import Struct, arrays_at, compiled, record_dtype

ORDERS = 4
"""The longest context, in tokens. Acceptance length, cold, 64 nodes, by this: 2.71, 3.14, 3.32 and 3.46 for one to four
tokens, no more for six (docs/decisions/hybrid.md)."""

WIDTH = 8
"""How many successors a row holds. The paper's value."""

STEADY_BINS = 4
"""Bins of how often the best successor came again."""

NOWHERE = -1
"""A token before the sequence's first one."""

TAG, WRITTEN, STEADY = WIDTH, WIDTH + 1, WIDTH + 2
"""Columns of a row after its successors: the hash of its context, when it was last written (0 for an empty row), and
how many times running the best successor was the same, less one, up to `STEADY_BINS` - 1."""

COLUMNS = WIDTH + 3

_BUCKET = 4
"""Rows of a bucket."""
_ALWAYS_KEPT = 2
"""Contexts of up to so many tokens always get a row, longer ones once the shorter one has one: half the rows at the
same acceptance length (docs/decisions/hybrid.md)."""


def has_layout(rows: Any) -> bool:
    """Whether `find` can read these rows: int32[r, COLUMNS], contiguous, r a power of two and a bucket or more."""
    return (
        isinstance(rows, np.ndarray)
        and rows.dtype == np.int32
        and rows.flags.c_contiguous
        and rows.ndim == 2
        and rows.shape[1] == COLUMNS
        and rows.shape[0] >= _BUCKET
        and rows.shape[0] & (rows.shape[0] - 1) == 0
    )


TABLE_STATE = record_dtype(clock=np.int64, contexts=np.int64, capacity=np.int64)
"""How often a table was written, how many contexts it holds, and the most rows that it may have."""


class TableArrays(NamedTuple):
    """The arrays of a successor table, until it grows.

    Attributes:
        rows: int32[r, COLUMNS].
        state: TABLE_STATE[1].
        context: int32[ORDERS], workspace.
    """

    rows: Annotated[Int32Array, 2]
    state: Annotated[Any, TABLE_STATE]
    context: Int32Array


def table_arrays(rows: Int32Array, capacity: int) -> TableArrays:
    """Of a table with these rows, which hold no contexts."""
    return TableArrays(rows, np.array([(0, 0, capacity)], TABLE_STATE), np.empty(ORDERS, np.int32))


_LAST_CLOCK = 2**31 - 1
"""What `WRITTEN` can hold, some 8 days at 64 sequences and 50 steps a second. Then the table is cleared."""


class SuccessorTable:
    """One tenant's contexts and their successors.

    Args:
        capacity: how many contexts it holds at most; `LEAST` or more, rounded down to a power of two.
    """

    LEAST = 1024

    def __init__(self, capacity: int) -> None:
        rows = np.zeros((self.LEAST, COLUMNS), np.int32)
        self.struct = Struct(table_arrays(rows, 1 << (capacity.bit_length() - 1)))

    @property
    def rows(self) -> Int32Array:
        return self.struct.fields.rows

    @property
    def contexts(self) -> int:
        """How many it holds."""
        return int(self.struct.fields.state["contexts"][0])

    @property
    def nbytes(self) -> int:
        return int(self.rows.nbytes)

    def update(self, tail: Int32Array, tokens: Int32Array, parents: Int32Array, top_tokens: Int32Array) -> None:
        """Learns the model's predictions at every node of a verified tree.

        Args:
            tail: int32[ORDERS], the last tokens of the sequence, the newest last; `NOWHERE` before its first one.
            tokens, parents, top_tokens: int32[m], int32[m] and int32[m, k >= WIDTH], as in `Feedback`; node 0 is the
                last token of `tail`.
        """
        _update_at(self.struct.address, tail, tokens, parents, top_tokens)
        self.grow()

    def grow(self) -> None:
        """Makes it larger while it is half full, as far as its capacity allows."""
        state = self.struct.fields.state
        while 2 * state["contexts"][0] > self.rows.shape[0] < state["capacity"][0]:
            larger: Int32Array = np.zeros((2 * self.rows.shape[0], COLUMNS), np.int32)
            state["contexts"] = _move(self.rows, larger)
            self.struct.set(self.struct.fields._replace(rows=larger))


@compiled
def wants_growth(table: TableArrays) -> bool:
    """Whether `SuccessorTable.grow` would make it larger."""
    rows, state = table.rows.shape[0], table.state[0]
    return bool(2 * state.contexts > rows and rows < state.capacity)


@compiled
def extended(context_hash: Integer, token: Integer) -> Integer:
    """The hash of a context with one more token before it, in [0, 2^32); the hash of none is 0."""
    mixed = (np.int64(context_hash) * 0x2545F491 + np.int64(token) + 0x3C6EF35F) & 0xFFFFFFFF
    mixed ^= mixed >> 15
    mixed = (mixed * 0x05EBCA6B) & 0xFFFFFFFF
    return mixed ^ (mixed >> 13)


@compiled
def find(rows: Int32Array, context_hash: Integer) -> int:
    """The row of a context; -1 where it is not known."""
    tag = np.int32(context_hash - 0x80000000)
    bucket = _bucket(rows, context_hash)
    for row in range(bucket, bucket + _BUCKET):
        if rows[row, TAG] == tag and rows[row, WRITTEN] > 0:
            return row
    return -1


@compiled
def read_context(
    tail: Int32Array, tokens: Int32Array, parents: Int32Array, node: Integer, first: int, context: Int32Array
) -> None:
    """Sets `context`, int32[ORDERS], to the last tokens of the path to `node`, the newest first.

    Nodes below `first` are not of the tree: there the path goes on in `tail`.
    """
    depth = 0
    while depth < ORDERS and node >= first:
        context[depth] = tokens[node]
        node = parents[node]
        depth += 1
    for back in range(ORDERS - depth):
        context[depth + back] = tail[ORDERS - 1 - back]


@compiled
def _bucket(rows: Int32Array, context_hash: Integer) -> int:
    """The first row of a context's bucket. The number of rows is a power of two."""
    return int(((context_hash * 0x9E3779B1) >> 12) & (rows.shape[0] - 1) & -_BUCKET)


@compiled
def update_table(
    table: TableArrays, tail: Int32Array, tokens: Int32Array, parents: Int32Array, top_tokens: Int32Array
) -> None:
    """As `SuccessorTable.update`, which may have to grow afterwards."""
    rows, state, context = table.rows, table.state[0], table.context
    if state.clock == _LAST_CLOCK:
        rows[:, WRITTEN] = 0
        state.clock = state.contexts = 0
    state.clock += 1
    for node in range(tokens.shape[0]):
        read_context(tail, tokens, parents, node, 1, context)
        context_hash: Integer = 0
        for order in range(ORDERS):
            if context[order] == NOWHERE:
                break
            context_hash = extended(context_hash, context[order])
            row = find(rows, context_hash)
            known = row >= 0
            if known:
                same = rows[row, 0] == top_tokens[node, 0]
                rows[row, STEADY] = min(rows[row, STEADY] + 1, STEADY_BINS - 1) if same else 0
            else:
                row = _oldest(rows, context_hash)
                state.contexts += 1 if rows[row, WRITTEN] == 0 else 0
                rows[row, TAG] = np.int32(context_hash - 0x80000000)
                rows[row, STEADY] = 0
            rows[row, WRITTEN] = state.clock
            for rank in range(WIDTH):
                rows[row, rank] = top_tokens[node, rank]
            if not known and order + 1 >= _ALWAYS_KEPT:
                break


@compiled
def _update_at(
    table: Integer, tail: Int32Array, tokens: Int32Array, parents: Int32Array, top_tokens: Int32Array
) -> None:
    """`update_table`, with the table's address."""
    update_table(arrays_at(TableArrays, table), tail, tokens, parents, top_tokens)


@compiled
def _oldest(rows: Int32Array, context_hash: Integer) -> int:
    """The row of a context's bucket that was written longest ago."""
    bucket = _bucket(rows, context_hash)
    oldest = bucket
    for row in range(bucket + 1, bucket + _BUCKET):
        if rows[row, WRITTEN] < rows[oldest, WRITTEN]:
            oldest = row
    return oldest


@compiled
def _move(rows: Int32Array, larger: Int32Array) -> int:
    """Copies all rows into an empty table; returns how many it took."""
    moved = 0
    for row in range(rows.shape[0]):
        if rows[row, WRITTEN] == 0:
            continue
        target = _oldest(larger, np.int64(rows[row, TAG]) + 0x80000000)
        moved += 1 if larger[target, WRITTEN] == 0 else 0
        for column in range(COLUMNS):
            larger[target, column] = rows[row, column]
    return moved
