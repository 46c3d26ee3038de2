"""Rows and tenants of a `DeviceTrie`: whose text goes where, and which goes away. Nothing is drafted here."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from draftwood_strategies.built_in import TrieOptions
from draftwood_strategies.device.arena import PROMPT_END, REGION, WRITTEN, DeviceSizes
from draftwood_strategies.device.launching import LAUNCHER, DeviceUnsupportedError, Launch
from draftwood_strategies.device.trie import DeviceTrie
from tests.strategies.device.arenas import CPU, int32, text_of

SIZES = DeviceSizes(rows=4, row_tokens=256, tenants=2, tenant_tokens=512)


@pytest.fixture(autouse=True)
def _texts_alone() -> Iterator[None]:
    """Weights are not learned."""
    token = LAUNCHER.set(lambda launch: None if launch.module == "learning" else Launch.run(launch))
    yield
    LAUNCHER.reset(token)


def prompt(trie: DeviceTrie, row: int, tokens: Sequence[int]) -> None:
    trie.append_prompts(int32([row]), int32(tokens), int32([0, len(tokens)]))
    trie.begin_outputs(int32([row]))


def learn(trie: DeviceTrie, row: int, tokens: Sequence[int]) -> None:
    trie.learn(int32([row]), int32([tokens]), int32([len(tokens)]))


def memory_of(trie: DeviceTrie, tenant: str) -> list[list[int]]:
    """By the sequences in it."""
    return sorted(tokens.tolist() for tokens in trie.sequences(tenant))


def kept_of(trie: DeviceTrie, tenant: str) -> torch.Tensor:
    """A copy of all that an arena has of a tenant."""
    region = trie._regions[tenant]
    return torch.cat([trie._memories[region], trie._weights[region]])


@pytest.mark.parametrize(
    ("part", "memory", "written"),
    [("outputs", [[3, 4]], 2), ("prompts", [[1, 2]], (1 << 29) + 2), ("both", [[1, 2, 3, 4]], 4)],
)
def test_the_memory_learns_the_part_that_the_options_say(part: Any, memory: list[list[int]], written: int) -> None:
    trie = DeviceTrie(SIZES, CPU, TrieOptions(learn=part))
    trie.begin(1, "a")
    prompt(trie, 1, [1, 2])
    learn(trie, 1, [3, 4])
    assert text_of(trie, 1) == [[1, 2, 3, 4]]
    assert memory_of(trie, "a") == memory
    assert trie.tokens("a") == sum(map(len, memory))
    assert trie._states[1, [WRITTEN, PROMPT_END]].tolist() == [written, 2]


def test_a_step_teaches_each_row_what_it_accepted() -> None:
    trie = DeviceTrie(SIZES, CPU)
    for row, tenant in enumerate("aba"):
        trie.begin(row, tenant)
    trie.begin(3, "a", learns=False)
    tokens = torch.arange(12, dtype=torch.int32).view(4, 3)
    trie.learn(int32([2, -1, 0, 3]), tokens, int32([2, 2, 3, 1]))
    assert [text_of(trie, row) for row in range(4)] == [[[6, 7, 8]], [], [[0, 1]], [[9]]]
    assert (memory_of(trie, "a"), memory_of(trie, "b")) == ([[0, 1], [6, 7, 8]], [])


def test_a_row_that_begins_has_nothing_of_the_one_before() -> None:
    trie = DeviceTrie(SIZES, CPU)
    trie.begin(0, "a")
    prompt(trie, 0, [1, 2, 3])
    trie.end(0)
    assert trie._states[0, REGION] == -1
    trie.begin(0, "b")
    assert text_of(trie, 0) == []
    assert trie._states[0, PROMPT_END] == -1
    prompt(trie, 0, [7])
    assert text_of(trie, 0) == [[7]]


def test_a_region_goes_to_a_new_tenant_from_the_one_that_was_used_longest_ago() -> None:
    trie = DeviceTrie(SIZES, CPU)
    for row, tenant in enumerate("ab"):
        trie.begin(row, tenant)
        learn(trie, row, [row + 1] * 40)
        trie.end(row)
    trie.begin(0, "a")
    trie.end(0)
    kept, region = kept_of(trie, "a"), trie._regions["b"]
    trie.begin(2, "c")
    assert trie._regions["c"] == region
    assert [trie.tokens(tenant) for tenant in "abc"] == [40, 0, 0]
    assert torch.equal(kept_of(trie, "a"), kept)
    assert (trie._memories[region, trie.layout.memory.heads :] == -1).all()


def test_rows_draft_from_their_own_texts_while_all_regions_have_live_rows() -> None:
    trie = DeviceTrie(SIZES, CPU)
    for row, tenant in enumerate("abc"):
        trie.begin(row, tenant)
    before = trie.arena[trie.layout.memories : trie.layout.states].clone()
    prompt(trie, 2, [1, 2])
    learn(trie, 2, [3])
    trie.import_runs("c", [np.array([1, 2, 3], np.int32)])
    trie.purge("c")
    assert torch.equal(trie.arena[trie.layout.memories : trie.layout.states], before)
    assert text_of(trie, 2) == [[1, 2, 3]]
    assert (trie.has_region("c"), trie.tokens("c")) == (False, 0)
    trie.end(0)
    trie.begin(3, "c")
    assert trie.has_region("c")


def test_a_tenant_beyond_its_region_loses_its_oldest_text_and_no_other_does() -> None:
    trie = DeviceTrie(SIZES, CPU)
    trie.begin(0, "a")
    trie.begin(1, "b")
    learn(trie, 0, [9, 8, 7])
    other = kept_of(trie, "a")
    for step in range(30):
        learn(trie, 1, [*range(100 * step, 100 * step + 50)])
    newest = [100 * step + i for step in range(30) for i in range(50)][-trie.tokens("b") :]
    assert trie.tokens("b") > 512 - 2 * 16
    assert memory_of(trie, "b") == [newest]
    assert torch.equal(kept_of(trie, "a"), other)


def test_a_purged_tenant_begins_again_as_before_any_traffic() -> None:
    trie = DeviceTrie(SIZES, CPU)
    for row, tenant in enumerate("ab"):
        trie.begin(row, tenant)
        learn(trie, row, [1, 2, 3])
    trie.import_runs("a", [np.array([5, 6], np.int32)])
    assert memory_of(trie, "a") == [[1, 2, 3], [5, 6]]
    other, weights = kept_of(trie, "b"), trie._weights[trie._regions["a"]]
    fresh = weights.clone()
    weights[:] = 7
    trie.purge("a")
    assert trie.tokens("a") == 0
    memory = trie._memories[trie._regions["a"]]
    assert (memory[: trie.layout.memory.links] == -1).all()
    assert (memory[trie.layout.memory.heads :] == -1).all()
    assert torch.equal(weights, fresh)
    learn(trie, 0, [4])
    assert memory_of(trie, "a") == [[4]]
    assert text_of(trie, 0) == [[1, 2, 3, 4]]
    assert torch.equal(kept_of(trie, "b"), other)


@pytest.mark.parametrize(
    ("name", "value"),
    [("rows", 0), ("row_tokens", 63), ("tenants", 0), ("nodes", 65), ("depth", 0), ("contexts", 1000)],
)
def test_sizes_that_are_not_allowed_are_named(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: {value} is not allowed; .*from \d+ to \d+$"):
        DeviceSizes(**{"rows": 4, "row_tokens": 256, "tenants": 2, "tenant_tokens": 512, name: value})


def test_a_gpu_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", None)
    with pytest.raises(DeviceUnsupportedError, match="the package triton is not installed; torch for CUDA brings it"):
        DeviceTrie(SIZES, torch.device("cuda"))
