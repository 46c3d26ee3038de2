"""The phrase index: an append-only log of token sequences in which every earlier occurrence of a phrase is found.

It stores every token, and with it four links to the previous occurrence of the phrase of 1, 2, 4 and 8 tokens that ends
there; hash tables hold the newest occurrence of each. That is a trie over everything written, of any depth, with nodes
that are not stored (compare hash chains of Lempel-Ziv match finders). The log is a ring of blocks, so that several
sequences can be written at once and each stays connected: a block belongs to one sequence and links to the block before
and after it. The oldest blocks are overwritten first.

Knows nothing of drafts, prompts or tenants.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from draftwood_strategies.native import Int32Array, Int64Array, Integer, compiled, flattened

ORDERS = (1, 2, 4, 8)
"""Lengths of the phrases that are linked; each costs four bytes a token and a hash table. Without 8 acceptance lengths
change by -0.05% (docs/decisions, "The trie's constants are flat")."""
TOKENS_PER_BLOCK = 16
"""A power of two. Not tuned."""
LEAST_TOKENS = 4 * TOKENS_PER_BLOCK
"""The smallest capacity of an index."""
START = 2**31 - 1
"""The start mark, written before the first token of each sequence: its beginning is a context like any other."""
NOWHERE = -1
"""No position, no block, no token."""

NEXT, PREVIOUS, OWNER = range(3)
"""Columns of `IndexArrays.blocks`."""
_CURSOR, _USED, _TOKENS = range(3)


class IndexArrays(NamedTuple):
    """The arrays of a phrase index, until it grows.

    Attributes:
        log: int32[slots], the tokens; `NOWHERE` where nothing is written.
        links: int32[slots, len(ORDERS)], where the phrase of that many tokens that ends here ended before.
        heads: int32[len(ORDERS), buckets], where a phrase of that hash ended last.
        blocks: int32[slots / TOKENS_PER_BLOCK, 3], for each block `NEXT`, `PREVIOUS` and `OWNER`.
    """

    log: Int32Array
    links: Int32Array
    heads: Int32Array
    blocks: Int32Array


class PhraseIndex:
    """Token sequences and the links between equal phrases in them.

    Attributes:
        arrays: its arrays, until it grows.
        ring: int64[3], the block to claim next, how many blocks have ever been in use, and how many tokens are stored.
    """

    def __init__(self, capacity_tokens: int, expected_tokens: int = 0) -> None:
        """Holds at most `capacity_tokens`, rounded down to blocks, start marks included.

        Raises:
            ValueError: `capacity_tokens` is less than four blocks.
        """
        if capacity_tokens < LEAST_TOKENS:
            raise ValueError(f"capacity_tokens: {capacity_tokens} is not allowed; it must be at least {LEAST_TOKENS}")
        self._most_blocks = capacity_tokens // TOKENS_PER_BLOCK
        blocks = 4
        while blocks * TOKENS_PER_BLOCK < expected_tokens and blocks < self._most_blocks:
            blocks *= 2
        blocks = min(blocks, self._most_blocks)
        self.arrays = IndexArrays(
            log=np.full(blocks * TOKENS_PER_BLOCK, NOWHERE, np.int32),
            links=np.empty((blocks * TOKENS_PER_BLOCK, len(ORDERS)), np.int32),
            heads=np.full((len(ORDERS), _buckets(blocks)), NOWHERE, np.int32),
            blocks=np.full((blocks, 3), NOWHERE, np.int32),
        )
        self.ring: Int64Array = np.zeros(3, np.int64)
        self._owners = 0

    @property
    def tokens(self) -> int:
        """How many tokens are stored."""
        return int(self.ring[_TOKENS])

    @property
    def nbytes(self) -> int:
        """The memory of all arrays, in bytes."""
        return sum(array.nbytes for array in self.arrays) + self.ring.nbytes

    def writer(self) -> Int64Array:
        """For a new sequence: int64[2], the position of its last token and its owner number."""
        self._owners = (self._owners + 1) % START
        return np.array([NOWHERE, self._owners], np.int64)

    def reserve(self, tokens: int, sequences: int = 1) -> None:
        """Grows until so many sequences can go on by that many tokens together, so that `arrays` stays as it is."""
        need = int(self.ring[_USED]) + tokens // TOKENS_PER_BLOCK + sequences
        while need > self.arrays.blocks.shape[0] < self._most_blocks:
            self._grow()

    def append(self, writer: Int64Array, tokens: Int32Array) -> None:
        """Goes on with the writer's sequence by `tokens`, int32[n]. Writers may be interleaved in any way."""
        self.reserve(tokens.shape[0])
        _append(self.arrays, self.ring, writer, tokens)

    def sequences(self) -> Iterator[Int32Array]:
        """The stored sequences, int32[n] each, the oldest first, without start marks.

        Of a sequence that has lost its beginning, the rest.
        """
        table = self.arrays.blocks
        blocks = table.shape[0]
        oldest = int(self.ring[_CURSOR]) if self.ring[_USED] == blocks else 0
        for block in (np.arange(blocks) + oldest) % blocks:
            if table[block, OWNER] >= 0 and table[block, PREVIOUS] < 0:
                tokens = self._read(int(block))
                if tokens.size:
                    yield tokens

    def _read(self, block: int) -> Int32Array:
        """The sequence from `block` on."""
        chain = []
        while block >= 0:
            chain.append(block)
            block = int(self.arrays.blocks[block, NEXT])
        tokens: Int32Array = self.arrays.log.reshape(-1, TOKENS_PER_BLOCK)[chain].reshape(-1)
        tokens = tokens[(tokens != NOWHERE) & (tokens != START)]
        return tokens

    def _grow(self) -> None:
        """Doubles the arrays. A bucket's chain goes on in both halves of the table, so nothing is linked anew."""
        log, links, heads, blocks = self.arrays
        old = blocks.shape[0]
        new = min(2 * old, self._most_blocks)
        self.arrays = IndexArrays(
            log=_extended(log, new * TOKENS_PER_BLOCK),
            links=_extended(links, new * TOKENS_PER_BLOCK),
            heads=np.tile(heads, (1, _buckets(new) // _buckets(old))),
            blocks=_extended(blocks, new),
        )
        if self.ring[_USED] == old:
            self.ring[_CURSOR] = old


def _buckets(blocks: int) -> int:
    """Hash buckets an order: one for two to four tokens, a power of two."""
    return 1 << ((blocks * TOKENS_PER_BLOCK - 1).bit_length() - 1)


def _extended(array: Int32Array, length: int) -> Int32Array:
    longer = np.full((length, *array.shape[1:]), NOWHERE, np.int32)
    longer[: array.shape[0]] = array
    return longer


@compiled
def lacks_space(ring: Int64Array, slots: Integer, tokens: Integer) -> bool:
    """Whether an index of so many slots, unless it is full, must grow before a sequence goes on by that many tokens."""
    return bool(ring[_USED] + tokens // TOKENS_PER_BLOCK + 1 > slots // TOKENS_PER_BLOCK)


@compiled
def following(index: IndexArrays, at: Integer) -> Integer:
    """The position after `at` in its sequence; `NOWHERE` if none. It may hold no token yet."""
    after: Integer = at + 1
    if after & (TOKENS_PER_BLOCK - 1) == 0:
        block = index.blocks[at // TOKENS_PER_BLOCK, NEXT]
        after = block * TOKENS_PER_BLOCK if block >= 0 else NOWHERE
    return after


@compiled
def preceding(index: IndexArrays, at: Integer) -> Integer:
    """The position before `at` in its sequence; `NOWHERE` if none."""
    before: Integer = at - 1
    if at & (TOKENS_PER_BLOCK - 1) == 0:
        block = index.blocks[at // TOKENS_PER_BLOCK, PREVIOUS]
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
def append(index: IndexArrays, ring: Int64Array, writer: Int64Array, tokens: Int32Array) -> None:
    """Writes `tokens` after the writer's last one and links the phrases that end at each.

    Args:
        index: has space for them.
        ring: the index's own, see `PhraseIndex.ring`.
        writer: int64[2], see `PhraseIndex.writer`.
    """
    at: Integer = writer[0]
    for i in range(tokens.shape[0]):
        if at >= 0 and index.blocks[at // TOKENS_PER_BLOCK, OWNER] != writer[1]:
            at = NOWHERE
        if at < 0 or (at + 1) & (TOKENS_PER_BLOCK - 1) == 0:
            at = _claim_block(index, ring, at, writer[1])
        else:
            at += 1
        index.log[at] = tokens[i]
        if tokens[i] != START:
            ring[_TOKENS] += 1
        _link(index, at)
    writer[0] = at


_append = flattened(append)


@compiled
def _link(index: IndexArrays, at: Integer) -> None:
    mask = index.heads.shape[1] - 1
    key: Integer = np.int64(0)
    order = 0
    back = at
    for length in range(1, ORDERS[-1] + 1):
        key = mixed(key, index.log[back])
        if length == ORDERS[order]:
            newest = index.heads[order, key & mask]
            index.links[at, order] = newest if newest != at else NOWHERE
            index.heads[order, key & mask] = at
            order += 1
        back = preceding(index, back)
        if back < 0:
            break
    for missing in range(order, len(ORDERS)):
        index.links[at, missing] = NOWHERE


@compiled
def _claim_block(index: IndexArrays, ring: Int64Array, last: Integer, owner: Integer) -> Integer:
    """Takes the ring's oldest block, forgets its tokens, and links it after the block of `last`.

    Where both are one block, nothing else is left of the sequence, and it starts anew there. Returns the block's first
    position.
    """
    log, blocks = index.log, index.blocks
    block = ring[_CURSOR] % blocks.shape[0]
    first: Integer = block * TOKENS_PER_BLOCK
    if blocks[block, OWNER] >= 0:
        if blocks[block, NEXT] >= 0:
            blocks[blocks[block, NEXT], PREVIOUS] = NOWHERE
        if blocks[block, PREVIOUS] >= 0:
            blocks[blocks[block, PREVIOUS], NEXT] = NOWHERE
        for at in range(first, first + TOKENS_PER_BLOCK):
            if log[at] >= 0 and log[at] != START:
                ring[_TOKENS] -= 1
            log[at] = NOWHERE
    ring[_CURSOR] = (block + 1) % blocks.shape[0]
    ring[_USED] = max(ring[_USED], block + 1)
    blocks[block, NEXT] = NOWHERE
    blocks[block, PREVIOUS] = NOWHERE
    blocks[block, OWNER] = owner
    if last >= 0 and last // TOKENS_PER_BLOCK != block:
        blocks[block, PREVIOUS] = last // TOKENS_PER_BLOCK
        blocks[last // TOKENS_PER_BLOCK, NEXT] = block
    return first
