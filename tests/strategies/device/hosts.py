"""The same state on the host and in an arena, bit for bit but for the rounding of weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from draftwood_strategies import create
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.device.arena import (
    FOLLOWED_MEMORY,
    FOLLOWED_TEXT,
    LINKED,
    MEMORY_AT,
    OWNER,
    PROMPT_END,
    TEXT_AT,
    WRITTEN,
    DeviceSizes,
    Region,
)
from draftwood_strategies.device.trie import DeviceTrie
from draftwood_strategies.trie import strategy as trie_strategy
from draftwood_strategies.trie.phrase_index import NOWHERE, ORDERS, WAYS, WAYS_BEFORE, IndexArrays, PhraseIndex
from draftwood_strategies.trie.strategy import TrieDrafter, TrieStrategy

TEXT_TOKENS, MEMORY_TOKENS = 512, 1024
CPU = torch.device("cpu")


def fixed_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's own indexes have the size of an arena's regions from the first on, and do not grow."""
    monkeypatch.setattr(trie_strategy, "_OWN_CAPACITY", TEXT_TOKENS)
    monkeypatch.setattr(trie_strategy, "_EXPECTED", TEXT_TOKENS)


def host_trie() -> TrieStrategy:
    strategy = create("trie")
    assert isinstance(strategy, TrieStrategy)
    strategy.memory = PhraseIndex(MEMORY_TOKENS, MEMORY_TOKENS)
    return strategy


def with_history(strategy: TrieStrategy, random: np.random.Generator, vocab: int, budget: int) -> TrieDrafter:
    """A live sequence after others of the same tenant, which drafted and wrote what they had written before, or not."""

    def text(most: int) -> Int32Array:
        return random.integers(0, vocab, random.integers(1, most)).astype(np.int32)

    for _ in range(random.integers(0, 6)):
        other, phrase = strategy.start(text(60)), text(30)
        for _ in range(random.integers(1, 6)):
            other.propose(budget)
            other.observe(phrase if random.random() < 0.5 else text(9), None)
    drafter = strategy.start(text(200))
    drafter.index_prompt(1 << 30)
    for _ in range(random.integers(0, 8)):
        drafter.propose(budget)
        drafter.observe(text(7), None)
    return drafter


def arena_of(tenants: list[tuple[TrieStrategy, list[TrieDrafter]]]) -> DeviceTrie:
    """With the memories of some tenants and their live sequences, which have the rows one after the other."""
    rows = [(number, drafter) for number, (_, drafters) in enumerate(tenants) for drafter in drafters]
    trie = DeviceTrie(DeviceSizes(len(rows), TEXT_TOKENS, len(tenants), MEMORY_TOKENS), CPU)
    for number, (strategy, _) in enumerate(tenants):
        trie.set_weights(f"tenant {number}", strategy.weights)
    layout, arena = trie.layout, trie.arena.numpy()
    memories = arena[layout.memories : layout.weights].reshape(-1, layout.memory.size)
    for row, (number, drafter) in enumerate(rows):
        strategy = tenants[number][0]
        trie.begin(row, f"tenant {number}")
        assert drafter.struct is not None
        fields = drafter.struct.fields
        _copy(arena[row * layout.text.size :], layout.text, fields.text, owner=0)
        _copy(memories[trie._regions[f"tenant {number}"]], layout.memory, strategy.memory.arrays)
        state = arena[layout.states :].reshape(-1)[row * 16 : row * 16 + 16]
        state[PROMPT_END], state[WRITTEN] = fields.state["prompt_end"][0], fields.state["written"][0]
        state[TEXT_AT], state[MEMORY_AT] = fields.writer["at"][0], fields.memory_writer["at"][0]
        state[OWNER] = fields.memory_writer["owner"][0]
        state[[FOLLOWED_TEXT, FOLLOWED_MEMORY]] = fields.followed
    return trie


def _copy(numbers: Int32Array, region: Region, index: IndexArrays, owner: int | None = None) -> None:
    """The host's index of the same size, whose chains of occurrences become links.

    Args:
        owner: of all blocks that have one; None for the host's numbers.
    """
    log, links, heads, blocks, ring = index
    assert blocks.shape[0] == region.blocks
    assert heads.shape[0] == WAYS_BEFORE[-1] * region.buckets
    numbers[: log.size] = log
    linked = numbers[region.links : region.next].reshape(region.slots, len(ORDERS), LINKED)
    linked[:] = NOWHERE
    newest = numbers[region.heads : region.heads + len(ORDERS) * region.buckets].reshape(len(ORDERS), region.buckets)
    for order, ways in enumerate(WAYS):
        for bucket in range(region.buckets):
            begin = WAYS_BEFORE[order] * region.buckets + bucket * ways
            chain = _chain(heads[begin : begin + ways].tolist(), links[:, order])
            newest[order, bucket] = chain[0] if chain else NOWHERE
            for place, at in enumerate(chain):
                earlier = chain[place + 1 : place + 1 + LINKED]
                linked[at, order, : len(earlier)] = earlier
    of_blocks = numbers[region.next : region.ring].reshape(3, -1)
    of_blocks[0], of_blocks[1], of_blocks[2] = blocks["next"], blocks["previous"], blocks["owner"]
    if owner is not None:
        of_blocks[2] = np.where(blocks["owner"] >= 0, owner, NOWHERE)
    numbers[region.ring : region.ring + 3] = [ring[name][0] for name in ("cursor", "used", "tokens")]


def _chain(latest: list[int], links: Any) -> list[int]:
    """All occurrences in a bucket, the newest first."""
    chain: list[int] = []
    while latest[len(chain) % len(latest)] >= 0:
        way = len(chain) % len(latest)
        chain.append(latest[way])
        latest[way] = int(links[latest[way]])
    return chain
