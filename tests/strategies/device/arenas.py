"""Arenas of a few rows and tenants on the CPU: the host's state in them, bit for bit but for the rounding of weights,
and what they draft."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
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
from draftwood_strategies.device.mixture import DeviceMixture
from draftwood_strategies.device.trie import DeviceDrafts, DeviceTrie
from draftwood_strategies.draft import DraftTree
from draftwood_strategies.trie import strategy as trie_strategy
from draftwood_strategies.trie.phrase_index import (
    NOWHERE,
    ORDERS,
    WAYS,
    WAYS_BEFORE,
    IndexArrays,
    PhraseIndex,
    stored_sequences,
)
from draftwood_strategies.trie.strategy import TrieDrafter, TrieStrategy

TEXT_TOKENS, MEMORY_TOKENS = 512, 1024
CPU = torch.device("cpu")


def int32(numbers: npt.ArrayLike) -> torch.Tensor:
    return torch.tensor(np.asarray(numbers, np.int32))


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
    for row, (number, drafter) in enumerate(rows):
        tenant, memory = f"tenant {number}", tenants[number][0].memory
        trie.begin(row, tenant)
        assert drafter.struct is not None
        fields = drafter.struct.fields
        for numbers, region, index, owner in (
            (trie._texts[row], trie.layout.text, fields.text, 0),
            (trie._memories[trie._regions[tenant]], trie.layout.memory, memory.arrays, None),
        ):
            copy_blocks(numbers.numpy(), region, index, owner)
            copy_links(numbers.numpy(), region, index)
        state = trie._states[row].numpy()
        state[PROMPT_END], state[WRITTEN] = fields.state["prompt_end"][0], fields.state["written"][0]
        state[TEXT_AT], state[MEMORY_AT] = fields.writer["at"][0], fields.memory_writer["at"][0]
        state[OWNER] = fields.memory_writer["owner"][0]
        state[[FOLLOWED_TEXT, FOLLOWED_MEMORY]] = fields.followed
    return trie


def copy_blocks(numbers: Int32Array, region: Region, index: IndexArrays, owner: int | None = None) -> None:
    """Writes into a region the tokens and blocks of the host's index of the same size.

    Args:
        owner: of all blocks that have one; None for the host's numbers.
    """
    log, _, _, blocks, ring = index
    assert blocks.shape[0] == region.blocks
    numbers[: log.size] = log
    of_blocks = numbers[region.next : region.ring].reshape(3, -1)
    of_blocks[0], of_blocks[1], of_blocks[2] = blocks["next"], blocks["previous"], blocks["owner"]
    if owner is not None:
        of_blocks[2] = np.where(blocks["owner"] >= 0, owner, NOWHERE)
    numbers[region.ring : region.ring + 3] = [ring[name][0] for name in ("cursor", "used", "tokens")]


def copy_links(numbers: Int32Array, region: Region, index: IndexArrays) -> None:
    """Writes into a region the links of the host's chains of occurrences."""
    _, links, heads, _, _ = index
    assert heads.shape[0] == WAYS_BEFORE[-1] * region.buckets
    linked = numbers[region.links : region.next].reshape(region.slots, len(ORDERS), LINKED)
    newest = numbers[region.heads : region.heads + len(ORDERS) * region.buckets].reshape(len(ORDERS), region.buckets)
    for order, ways in enumerate(WAYS):
        for bucket in range(region.buckets):
            begin = WAYS_BEFORE[order] * region.buckets + bucket * ways
            chain = _chain(heads[begin : begin + ways].tolist(), links[:, order])
            ended = [*chain, *[NOWHERE] * (1 + LINKED)]
            newest[order, bucket] = ended[0]
            for place, at in enumerate(chain, 1):
                linked[at, order] = ended[place : place + LINKED]


def _chain(latest: list[int], links: Any) -> list[int]:
    """All occurrences in a bucket, the newest first."""
    chain: list[int] = []
    while latest[len(chain) % len(latest)] >= 0:
        way = len(chain) % len(latest)
        chain.append(latest[way])
        latest[way] = int(links[latest[way]])
    return chain


def text_of(trie: DeviceTrie, row: int) -> list[list[int]]:
    """What a row has written."""
    parts, numbers = trie.layout.text, trie._texts[row].numpy()
    following, previous, owners = numbers[parts.next : parts.ring].reshape(3, -1)
    found = stored_sequences(numbers[: parts.slots], following, previous, owners, 0)
    return [tokens.tolist() for tokens in found]


def space(rows: int, nodes: int = 64) -> DeviceDrafts:
    tokens, parents = (torch.full((rows, nodes), -9, dtype=torch.int32) for _ in range(2))
    return DeviceDrafts(tokens, parents, torch.zeros(rows, nodes), torch.zeros(rows, dtype=torch.int32))


def drafted(device: DeviceTrie | DeviceMixture, budgets: list[int]) -> list[DraftTree]:
    """The drafts of the rows 0, 1, ...; checked."""
    out = space(len(budgets))
    device.propose(torch.arange(len(budgets), dtype=torch.int32), int32(budgets), out)
    trees = [DraftTree(*(part[row, :count].numpy().copy() for part in out[:3])) for row, count in enumerate(out.counts)]
    for tree in trees:
        tree.check()
    return trees
