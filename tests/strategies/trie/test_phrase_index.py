"""The phrase index, against a ring of blocks written down plainly."""

from __future__ import annotations

from collections import deque

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.trie.phrase_index import TOKENS_PER_BLOCK, PhraseIndex

WRITES = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 70)), min_size=1, max_size=30)


class PlainRing:
    """At most `blocks` blocks, the oldest first; each is a writer's name and up to `TOKENS_PER_BLOCK` of its tokens."""

    def __init__(self, blocks: int) -> None:
        self._blocks: deque[tuple[int, list[int]]] = deque(maxlen=blocks)

    def append(self, writer: int, tokens: list[int]) -> None:
        for token in tokens:
            own = [written for name, written in self._blocks if name == writer]
            if not own or len(own[-1]) == TOKENS_PER_BLOCK:
                own.append([])
                self._blocks.append((writer, own[-1]))
            own[-1].append(token)

    def sequences(self) -> list[list[int]]:
        names = dict.fromkeys(name for name, _ in self._blocks)
        return [[token for name, block in self._blocks if name == own for token in block] for own in names]


def numbered(start: int, count: int) -> Int32Array:
    return np.arange(start, start + count, dtype=np.int32)


def test_a_writer_that_reuses_its_own_last_block_starts_a_new_sequence() -> None:
    """A's first block is the oldest of the full ring when A goes on: its new block is the old one."""
    index = PhraseIndex(4 * TOKENS_PER_BLOCK)
    a, b = index.writer(marked=False), index.writer(marked=False)
    index.append(a, numbered(100, TOKENS_PER_BLOCK))
    index.append(b, numbered(200, 3 * TOKENS_PER_BLOCK))
    index.append(a, numbered(300, TOKENS_PER_BLOCK))
    kept = [numbered(200, 3 * TOKENS_PER_BLOCK).tolist(), numbered(300, TOKENS_PER_BLOCK).tolist()]
    assert [sequence.tolist() for sequence in index.sequences()] == kept
    assert index.tokens == 4 * TOKENS_PER_BLOCK


@given(st.integers(4, 8), WRITES)
def test_interleaved_writers_leave_what_a_plain_ring_of_blocks_holds(
    blocks: int, writes: list[tuple[int, int]]
) -> None:
    index, ring = PhraseIndex(blocks * TOKENS_PER_BLOCK), PlainRing(blocks)
    writers = [index.writer(marked=False) for _ in range(5)]
    written = 0
    for writer, count in writes:
        index.append(writers[writer], numbered(written, count))
        ring.append(writer, list(range(written, written + count)))
        written += count
        found = [sequence.tolist() for sequence in index.sequences()]
        assert found == ring.sequences()
        assert index.tokens == sum(map(len, found))
        blocks_in_use = np.arange(len(index.arrays.blocks))
        for side in ("next", "previous"):
            assert not (index.arrays.blocks[side] == blocks_in_use).any(), "linked to itself"
