"""The phrase index: an append-only log of token sequences in which every earlier occurrence of a phrase is found.

It stores every token, and with it four links to earlier occurrences of the phrase of 1, 2, 4 and 8 tokens that ends
there; hash tables hold the newest occurrences of each. That is a trie over everything written, of any depth, with nodes
that are not stored (compare hash chains of Lempel-Ziv match finders). The log is a ring of blocks, so that several
sequences can be written at once and each stays connected: a block belongs to one sequence and links to the block before
and after it. The oldest blocks are overwritten first.

Knows nothing of drafts, prompts or tenants.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from draftwood_strategies.arrays import Int32Array, Integer
from draftwood_strategies.native import Struct, address_of, arrays_at, compiled, record_at, record_dtype

ORDERS = (1, 2, 4, 8)
"""Lengths of the phrases that are linked; each costs four bytes a token and a hash table. Without 8 acceptance lengths
change by -0.05% (docs/decisions/trie-scores.md)."""
WAYS = (4, 2, 1, 1)
"""How many of the newest occurrences of a phrase of each order its hash table holds, a power of two. An occurrence
links to the one as many occurrences before it, so that a search loads several side by side. With 1 everywhere it waits
for each to learn where the next one is, and a draft of 64 nodes takes 3 us longer
(docs/decisions/draft-time.md)."""
WAYS_BEFORE = (*itertools.accumulate(WAYS, initial=0),)
"""How many ways the shorter orders have together; the last is that of all."""
TOKENS_PER_BLOCK = 16
"""A power of two."""
LEAST_TOKENS = 4 * TOKENS_PER_BLOCK
"""The smallest capacity of an index."""
START = 2**31 - 1
"""The start mark, written before the first token of a sequence: its beginning is a context like any other."""
NOWHERE = -1
"""No position, no block, no token."""

BLOCK = record_dtype(next=np.int32, previous=np.int32, owner=np.int32)
"""The blocks after and before a block in its sequence, and the number of that; `NOWHERE` for none."""
RING = record_dtype(cursor=np.int64, used=np.int64, limit=np.int64, tokens=np.int64)
"""The block to claim next, how many blocks have ever been in use, how many there may be, and how many tokens are
stored."""
WRITER = record_dtype(at=np.int64, owner=np.int64, marked=np.int64)
"""A sequence that is written: the position of its last token, its number, and 1 if it begins with a start mark."""
Writer: TypeAlias = npt.NDArray[Any]
"""WRITER[1]."""


class IndexArrays(NamedTuple):
    """The arrays of a phrase index, until it grows.

    Attributes:
        log: int32[slots], the tokens; `NOWHERE` where nothing is written.
        links: int32[slots, len(ORDERS)], where the phrase of that many tokens that ends here ended `WAYS` occurrences
            before.
        heads: int32[WAYS_BEFORE[-1] * buckets], for each order the buckets of its hash table (`bucket_at`).
        blocks: BLOCK[slots / TOKENS_PER_BLOCK].
        ring: RING[1].
    """

    log: Int32Array
    links: Annotated[Int32Array, 2]
    heads: Int32Array
    blocks: Annotated[Any, BLOCK]
    ring: Annotated[Any, RING]


class PhraseIndex:
    """Token sequences and the links between equal phrases in them.

    Attributes:
        struct: its arrays.
    """

    def __init__(self, capacity_tokens: int, expected_tokens: int = 0) -> None:
        """Holds at most `capacity_tokens`, rounded down to blocks, start marks included.

        Raises:
            ValueError: `capacity_tokens` is less than four blocks.
        """
        if capacity_tokens < LEAST_TOKENS:
            raise ValueError(f"capacity_tokens: {capacity_tokens} is not allowed; it must be at least {LEAST_TOKENS}")
        limit = capacity_tokens // TOKENS_PER_BLOCK
        blocks = 4
        while blocks * TOKENS_PER_BLOCK < expected_tokens and blocks < limit:
            blocks *= 2
        blocks = min(blocks, limit)
        self.struct = Struct(
            IndexArrays(
                log=np.full(blocks * TOKENS_PER_BLOCK, NOWHERE, np.int32),
                links=np.empty((blocks * TOKENS_PER_BLOCK, len(ORDERS)), np.int32),
                heads=np.full(WAYS_BEFORE[-1] * _buckets(blocks), NOWHERE, np.int32),
                blocks=np.full(blocks, _NO_BLOCK, BLOCK),
                ring=np.array([(0, 0, limit, 0)], RING),
            )
        )
        self._owners = 0

    @property
    def arrays(self) -> IndexArrays:
        """Its arrays, until it grows."""
        return self.struct.fields

    @property
    def tokens(self) -> int:
        """How many tokens are stored."""
        return int(self.arrays.ring["tokens"][0])

    @property
    def nbytes(self) -> int:
        """The memory of all arrays, in bytes."""
        return sum(array.nbytes for array in self.arrays)

    def writer(self, marked: bool) -> Writer:
        """For a new sequence, with a start mark or without."""
        self._owners = (self._owners + 1) % START
        return np.array([(NOWHERE, self._owners, marked)], WRITER)

    def reserve(self, tokens: int, sequences: int = 1) -> None:
        """Grows until so many sequences can go on by that many tokens together, so that `arrays` stays as it is."""
        while _lacks_space_at(self.struct.address, tokens, sequences):
            self._grow()

    def append(self, writer: Writer, tokens: Int32Array) -> None:
        """Goes on with the writer's sequence by `tokens`, int32[n]. Writers may be interleaved in any way."""
        self.reserve(tokens.shape[0] + 1)
        _append_at(self.struct.address, address_of(writer), tokens)

    def sequences(self) -> Iterator[Int32Array]:
        """The stored sequences, int32[n] each, the oldest first, without start marks.

        Of a sequence that has lost its beginning, the rest.
        """
        table = self.arrays.blocks
        cursor, used, _, _ = self.arrays.ring[0]
        oldest = int(cursor) if used == table.shape[0] else 0
        return stored_sequences(self.arrays.log, table["next"], table["previous"], table["owner"], oldest)

    def _grow(self) -> None:
        """Doubles the arrays. A bucket's chain goes on in both halves of the table, so nothing is linked anew."""
        log, links, heads, blocks, ring = self.arrays
        old = blocks.shape[0]
        new = min(2 * old, int(ring["limit"][0]))
        tables = np.split(heads, np.multiply(WAYS_BEFORE[1:-1], _buckets(old)))
        self.struct.set(
            IndexArrays(
                log=_extended(log, new * TOKENS_PER_BLOCK, NOWHERE),
                links=_extended(links, new * TOKENS_PER_BLOCK, NOWHERE),
                heads=np.concatenate([np.tile(table, _buckets(new) // _buckets(old)) for table in tables]),
                blocks=_extended(blocks, new, _NO_BLOCK),
                ring=ring,
            )
        )
        if ring["used"][0] == old:
            ring["cursor"][0] = old


def stored_sequences(
    log: Int32Array, following: Int32Array, previous: Int32Array, owners: Int32Array, oldest: int
) -> Iterator[Int32Array]:
    """See `PhraseIndex.sequences`.

    Args:
        log: int32[blocks * TOKENS_PER_BLOCK].
        following, previous, owners: int32[blocks] each, as in `BLOCK`.
        oldest: the block that was claimed first.
    """
    for first in np.roll(np.arange(owners.shape[0]), -oldest).tolist():
        if owners[first] < 0 or previous[first] >= 0:
            continue
        chain, block = [], first
        while block >= 0:
            chain.append(block)
            block = int(following[block])
        tokens: Int32Array = log.reshape(-1, TOKENS_PER_BLOCK)[chain].reshape(-1)
        tokens = tokens[(tokens != NOWHERE) & (tokens != START)]
        if tokens.size:
            yield tokens


def _buckets(blocks: int) -> int:
    """Hash buckets an order: one for two to four tokens, a power of two."""
    return 1 << ((blocks * TOKENS_PER_BLOCK - 1).bit_length() - 1)


_NO_BLOCK = np.array((NOWHERE, NOWHERE, NOWHERE), BLOCK)


def _extended(array: npt.NDArray[Any], length: int, fill: Any) -> npt.NDArray[Any]:
    longer = np.full((length, *array.shape[1:]), fill, array.dtype)
    longer[: array.shape[0]] = array
    return longer


@compiled
def lacks_space(index: IndexArrays, tokens: Integer, sequences: int) -> bool:
    """Whether an index must grow, and can, before so many sequences go on by that many tokens together."""
    ring, blocks = index.ring[0], index.blocks.shape[0]
    return bool(ring.used + tokens // TOKENS_PER_BLOCK + sequences > blocks and blocks < ring.limit)


@compiled
def _lacks_space_at(index: Integer, tokens: Integer, sequences: int) -> bool:
    """`lacks_space`, with the address of the index."""
    return lacks_space(arrays_at(IndexArrays, index), tokens, sequences)


@compiled
def following(index: IndexArrays, at: Integer) -> Integer:
    """The position after `at` in its sequence; `NOWHERE` if none. It may hold no token yet."""
    after: Integer = at + 1
    if after & (TOKENS_PER_BLOCK - 1) == 0:
        block = index.blocks[at // TOKENS_PER_BLOCK].next
        after = block * TOKENS_PER_BLOCK if block >= 0 else NOWHERE
    return after


@compiled
def preceding(index: IndexArrays, at: Integer) -> Integer:
    """The position before `at` in its sequence; `NOWHERE` if none."""
    before: Integer = at - 1
    if at & (TOKENS_PER_BLOCK - 1) == 0:
        block = index.blocks[at // TOKENS_PER_BLOCK].previous
        before = block * TOKENS_PER_BLOCK + TOKENS_PER_BLOCK - 1 if block >= 0 else NOWHERE
    return before


@compiled
def mixed(key: Integer, token: Integer) -> Integer:
    """The hash of a phrase that is one token longer, to the left, than the one of hash `key`."""
    x = (np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)) ^ (np.uint64(token) + np.uint64(0x7F4A7C15))
    x ^= x >> np.uint64(29)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    return np.int64((x ^ (x >> np.uint64(32))) & np.uint64(0x7FFFFFFFFFFFFFFF))


@compiled
def phrase_hash(tokens: Int32Array, end: Integer, length: Integer) -> Integer:
    """The hash of `tokens[end - length : end]`."""
    key: Integer = np.int64(0)
    for back in range(length):
        key = mixed(key, tokens[end - 1 - back])
    return key


@compiled
def bucket_at(index: IndexArrays, key: Integer, order: int) -> Integer:
    """Where the bucket of the phrases of this hash and order begins in the heads: `WAYS` occurrences, the newest first,
    `NOWHERE` for none."""
    buckets = index.heads.shape[0] // WAYS_BEFORE[-1]
    begin: Integer = WAYS_BEFORE[order] * buckets + (key & (buckets - 1)) * WAYS[order]
    return begin


@compiled
def append(index: IndexArrays, writer: Any, tokens: Int32Array) -> None:
    """Writes `tokens` after the writer's last one and links the phrases that end at each.

    Args:
        index: has space for them.
        writer: a WRITER.
    """
    if writer.at < 0 and writer.marked and tokens.shape[0] > 0:
        _write(index, writer, START)
    for i in range(tokens.shape[0]):
        _write(index, writer, tokens[i])
        index.ring[0].tokens += 1


@compiled
def _write(index: IndexArrays, writer: Any, token: Integer) -> None:
    at: Integer = writer.at
    if at >= 0 and index.blocks[at // TOKENS_PER_BLOCK].owner != writer.owner:
        at = NOWHERE
    if at < 0 or (at + 1) & (TOKENS_PER_BLOCK - 1) == 0:
        at = _claim_block(index, at, writer.owner)
    else:
        at += 1
    index.log[at] = token
    _link(index, at)
    writer.at = at


@compiled
def _append_at(index: Integer, writer: Integer, tokens: Int32Array) -> None:
    """`append`, with the addresses of index and writer."""
    append(arrays_at(IndexArrays, index), record_at(WRITER, writer), tokens)


@compiled
def _link(index: IndexArrays, at: Integer) -> None:
    key: Integer = np.int64(0)
    order = 0
    back = at
    for length in range(1, ORDERS[-1] + 1):
        key = mixed(key, index.log[back])
        if length == ORDERS[order]:
            newest = bucket_at(index, key, order)
            oldest = newest + WAYS[order] - 1
            linked = index.heads[oldest]
            index.links[at, order] = linked if linked != at else NOWHERE
            for way in range(oldest, newest, -1):
                index.heads[way] = index.heads[way - 1]
            index.heads[newest] = at
            order += 1
        back = preceding(index, back)
        if back < 0:
            break
    for missing in range(order, len(ORDERS)):
        index.links[at, missing] = NOWHERE


@compiled
def _claim_block(index: IndexArrays, last: Integer, owner: Integer) -> Integer:
    """Takes the ring's oldest block, forgets its tokens, and links it after the block of `last`.

    Where both are one block, nothing else is left of the sequence, and it starts anew there. Returns the block's first
    position.
    """
    log, blocks, ring = index.log, index.blocks, index.ring[0]
    number = ring.cursor % blocks.shape[0]
    block = blocks[number]
    first: Integer = number * TOKENS_PER_BLOCK
    if block.owner >= 0:
        if block.next >= 0:
            blocks[block.next].previous = NOWHERE
        if block.previous >= 0:
            blocks[block.previous].next = NOWHERE
        for at in range(first, first + TOKENS_PER_BLOCK):
            if log[at] >= 0 and log[at] != START:
                ring.tokens -= 1
            log[at] = NOWHERE
    ring.cursor = (number + 1) % blocks.shape[0]
    ring.used = max(ring.used, number + 1)
    block.next = NOWHERE
    block.previous = NOWHERE
    block.owner = owner
    if last >= 0 and last // TOKENS_PER_BLOCK != number:
        block.previous = last // TOKENS_PER_BLOCK
        blocks[last // TOKENS_PER_BLOCK].next = number
    return first
