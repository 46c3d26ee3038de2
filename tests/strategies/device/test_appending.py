"""The kernel that writes texts and memories, against the host's phrase index."""

from __future__ import annotations

import numpy as np
import pytest

from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.device.arena import DeviceSizes, Region
from draftwood_strategies.device.trie import DeviceTrie
from draftwood_strategies.trie.phrase_index import TOKENS_PER_BLOCK, PhraseIndex
from tests.strategies.device.arenas import CPU, copy_blocks, copy_links, int32, text_of

Runs = list[list[int]]


def random_steps(seed: int, rows: int, steps: int, longest: int) -> list[Runs]:
    """For each step the tokens of each row; many rows are idle."""
    random = np.random.default_rng(seed)
    lengths = random.integers(-longest, longest + 1, (steps, rows)).clip(0)
    return [[random.integers(0, 5, n).tolist() for n in row] for row in lengths]


def trie_of(sizes: DeviceSizes, tenants: str) -> DeviceTrie:
    """With a row for each of these tenants, who is a letter; rows are the sequences 1, 2, ... of memories."""
    trie = DeviceTrie(sizes, CPU)
    for row, tenant in enumerate(tenants):
        trie.begin(row, tenant)
    return trie


def write(trie: DeviceTrie, runs: Runs) -> None:
    """The rows 0, 1, ... write these tokens."""
    rows, tokens = int32(range(len(runs))), int32([token for run in runs for token in run] or [0])
    offsets = int32(np.cumsum([0, *map(len, runs)]))
    trie.append_to_texts(rows, tokens, offsets, counted=False)
    trie.append_to_memories(rows, tokens, offsets)


def host_index(slots: int) -> PhraseIndex:
    """With as many blocks as a region from the beginning."""
    return PhraseIndex(slots, slots)


def assert_equal(found: Int32Array, region: Region, index: PhraseIndex, owner: int | None = None) -> None:
    """The same tokens at the same places, in the same blocks; and while the region is not full the same chains of
    occurrences, of which the host forgets the overwritten ones at another time."""
    expected = found.copy()
    copy_blocks(expected, region, index.arrays, owner)
    if index.arrays.ring["used"][0] < region.blocks:
        copy_links(expected, region, index.arrays)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("seed", range(6))
def test_texts_and_memories_have_the_chains_of_the_host(seed: int) -> None:
    """While no region is full. Three rows are of one tenant."""
    trie = trie_of(DeviceSizes(4, 1024, 2, 2048), "abaa")
    texts, memories = [host_index(1024) for _ in range(4)], {tenant: host_index(2048) for tenant in "ab"}
    own = [text.writer(marked=False) for text in texts]
    shared = [memories[tenant].writer(marked=True) for tenant in "abaa"]
    for row, writer in enumerate(shared):
        writer["owner"] = row + 1
    for runs in random_steps(seed, rows=4, steps=8, longest=100):
        write(trie, runs)
        for row, tenant in enumerate("abaa"):
            texts[row].append(own[row], np.array(runs[row], np.int32))
            memories[tenant].append(shared[row], np.array(runs[row], np.int32))
    for row, text in enumerate(texts):
        assert_equal(trie._texts[row].numpy(), trie.layout.text, text, owner=0)
    for tenant, memory in memories.items():
        assert memory.arrays.ring["used"][0] < trie.layout.memory.blocks
        assert_equal(trie._memories[trie._regions[tenant]].numpy(), trie.layout.memory, memory)


@pytest.mark.parametrize("longest", [3, 15, 300])
@pytest.mark.parametrize("seed", range(2))
def test_a_full_ring_forgets_what_the_host_forgets(seed: int, longest: int) -> None:
    """Of so few blocks, 16 tokens of each row are written at a time, start marks included."""
    rows, slots = 5, 16 * TOKENS_PER_BLOCK
    trie, index, text = trie_of(DeviceSizes(rows, 64, 1, slots), "a" * rows), host_index(slots), host_index(64)
    writers, own = [index.writer(marked=True) for _ in range(rows)], text.writer(marked=False)
    for runs in random_steps(seed, rows, steps=60, longest=longest):
        if longest > 15:
            runs = [[] if row else run for row, run in enumerate(runs)]
        write(trie, runs)
        for writer, run in zip(writers, runs, strict=True):
            index.append(writer, np.array(run, np.int32))
        assert_equal(trie._memories[0].numpy(), trie.layout.memory, index)
        if longest <= 15:
            text.append(own, np.array(runs[0], np.int32))
            assert_equal(trie._texts[0].numpy(), trie.layout.text, text, owner=0)


def test_recorded_sequences_begin_with_their_marks() -> None:
    trie, index = DeviceTrie(DeviceSizes(1, 64, 2, 4096), CPU), host_index(4096)
    assert trie.claim("other")
    runs = [run for run in random_steps(1, rows=30, steps=1, longest=120)[0] if run]
    for number, run in enumerate(runs, 1):
        writer = index.writer(marked=True)
        writer["owner"] = number
        index.append(writer, np.array(run, np.int32))
    regions = trie._memories.numpy()
    untouched = regions[trie._regions["other"]].copy()
    trie.import_runs("a", [np.array(run, np.int32) for run in runs])
    assert_equal(regions[trie._regions["a"]], trie.layout.memory, index)
    assert (regions[trie._regions["other"]] == untouched).all()


def test_of_a_prompt_longer_than_its_region_the_end_is_kept() -> None:
    trie = trie_of(DeviceSizes(1, 256, 1, 256), "a")
    prompt = [*range(1000, 3000)]
    trie.append_to_texts(int32([0]), int32(prompt), int32([0, 2000]), counted=False)
    assert text_of(trie, 0) == [prompt[-256:]]
