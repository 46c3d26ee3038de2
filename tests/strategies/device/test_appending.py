"""The kernel that writes texts and memories, against the host's phrase index."""

from __future__ import annotations

import numpy as np
import pytest

from draftwood_strategies.device.arena import LINKED, TEXT, DeviceSizes
from draftwood_strategies.trie.phrase_index import NOWHERE, ORDERS, TOKENS_PER_BLOCK, PhraseIndex
from tests.strategies.device.arenas import PlainArena, RegionView, buckets_of, host_chain

Runs = list[list[int]]


def random_steps(seed: int, rows: int, steps: int, longest: int, vocabulary: int = 5) -> list[Runs]:
    """For each step the tokens of each row; many rows are idle."""
    random = np.random.default_rng(seed)
    lengths = random.integers(-longest, longest + 1, (steps, rows)).clip(0)
    return [[random.integers(0, vocabulary, n).tolist() for n in row] for row in lengths]


def host_index(slots: int) -> PhraseIndex:
    """With as many blocks as a region from the beginning."""
    return PhraseIndex(slots, slots)


def assert_equal(view: RegionView, index: PhraseIndex) -> None:
    """The same tokens at the same positions, in the same sequences."""
    arrays = index.arrays
    assert view.log.tolist() == arrays.log.tolist()
    for part, name in zip(view.blocks, ("next", "previous", "owner"), strict=True):
        assert part.tolist() == arrays.blocks[name].tolist(), name
    assert view.tokens == index.tokens
    assert sorted(view.sequences()) == sorted(sequence.tolist() for sequence in index.sequences())


def assert_same_chains(view: RegionView, index: PhraseIndex) -> None:
    arrays = index.arrays
    assert view.heads.shape[1] == buckets_of(arrays)
    for order in range(len(ORDERS)):
        for bucket in range(buckets_of(arrays)):
            chain = view.chain(order, bucket)
            assert chain == host_chain(arrays, order, bucket), (order, bucket)
            for i, at in enumerate(chain):
                before = chain[i + 1 : i + 1 + LINKED]
                assert view.links[at, order].tolist() == before + [NOWHERE] * (LINKED - len(before))


@pytest.mark.parametrize("seed", range(6))
def test_texts_and_memories_have_the_chains_of_the_host(seed: int) -> None:
    """While no region is full. Rows 0, 2 and 3 are of one tenant."""
    arena = PlainArena(DeviceSizes(4, 1024, 2, 2048), regions=(0, 1, 0, 0))
    texts, memories = [host_index(1024) for _ in range(4)], [host_index(2048) for _ in range(2)]
    own = [text.writer(marked=False) for text in texts]
    shared = [memories[tenant].writer(marked=True) for tenant in (0, 1, 0, 0)]
    for row, writer in enumerate(shared):
        writer["owner"] = row + 1
    for writer in own:
        writer["owner"] = 0
    for runs in random_steps(seed, rows=4, steps=8, longest=100):
        arena.write([0, 1, 2, 3], runs)
        for row, run in enumerate(runs):
            written = np.array(run, np.int32)
            texts[row].append(own[row], written)
            memories[(0, 1, 0, 0)[row]].append(shared[row], written)
    for view, index in zip((*arena.texts, *arena.memories), (*texts, *memories), strict=True):
        assert_equal(view, index)
        assert_same_chains(view, index)


@pytest.mark.parametrize("longest", [3, 15, 300])
@pytest.mark.parametrize("seed", range(4))
def test_a_full_ring_forgets_what_the_host_forgets(seed: int, longest: int) -> None:
    """Of so few blocks, 16 tokens of each row are written at a time, start marks included."""
    rows, slots = 5, 16 * TOKENS_PER_BLOCK
    arena, index = PlainArena(DeviceSizes(rows, 64, 1, slots), regions=(0,) * rows), host_index(slots)
    writers = [index.writer(marked=True) for _ in range(rows)]
    text = host_index(64)
    own = text.writer(marked=False)
    own["owner"] = 0
    for runs in random_steps(seed, rows, steps=60, longest=longest):
        if longest > 15:
            runs = [[] if row else run for row, run in enumerate(runs)]
        arena.write([*range(rows)], runs)
        for writer, run in zip(writers, runs, strict=True):
            index.append(writer, np.array(run, np.int32))
        assert_equal(arena.memories[0], index)
        if longest <= 15:
            text.append(own, np.array(runs[0], np.int32))
            assert_equal(arena.texts[0], text)


def test_recorded_sequences_begin_with_their_marks() -> None:
    arena, index = PlainArena(DeviceSizes(1, 64, 2, 4096), regions=(0,)), host_index(4096)
    runs = random_steps(1, rows=30, steps=1, longest=120)[0]
    for writer_number, run in enumerate(runs, 1):
        writer = index.writer(marked=True)
        writer["owner"] = writer_number
        index.append(writer, np.array(run, np.int32))
    untouched = arena.memories[0].all.copy()
    arena.record(1, [*range(1, 31)], runs)
    assert_equal(arena.memories[1], index)
    assert_same_chains(arena.memories[1], index)
    assert (arena.memories[0].all == untouched).all()


def test_rows_that_are_not_there_or_do_not_learn_change_nothing() -> None:
    arena = PlainArena(DeviceSizes(3, 64, 1, 256), regions=(0, -1, 0))
    arena.states[2, 1] = 0
    before = arena.memories[0].all.copy()
    arena.write([-1, 1, 2, -1], [[1, 2], [3], [4], []])
    assert (arena.memories[0].all == before).all()
    assert [text.sequences() for text in arena.texts] == [[], [[3]], [[4]]]


def test_of_a_prompt_longer_than_its_region_the_end_is_kept() -> None:
    arena = PlainArena(DeviceSizes(1, 256, 1, 256), regions=(0,))
    prompt = [*range(1000, 3000)]
    arena.append(TEXT, [0], [prompt])
    assert arena.texts[0].sequences() == [prompt[-256:]]
