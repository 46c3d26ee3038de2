"""Rows and tenants of a `DeviceTrie`: whose text goes where, and which goes away. Nothing is drafted here."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.built_in import TrieOptions
from draftwood_strategies.device import trie as device_trie
from draftwood_strategies.device.arena import (
    ADDED,
    PROMPT_END,
    REGION,
    STATE,
    UNIT_BITS,
    WRITTEN,
    ArenaTooLargeError,
    DeviceSizes,
)
from draftwood_strategies.device.launching import LAUNCHER, DeviceUnsupportedError, Launch
from draftwood_strategies.device.trie import DeviceTrie
from draftwood_strategies.trie.strategy import TrieStrategy
from draftwood_strategies.trie.weights import COUNTED
from tests.strategies.device.arenas import RegionView

CPU = torch.device("cpu")
SIZES = DeviceSizes(rows=4, row_tokens=256, tenants=2, tenant_tokens=512)


@pytest.fixture(autouse=True)
def _texts_alone() -> Iterator[None]:
    """Weights are not learned."""
    token = LAUNCHER.set(lambda launch: None if launch.module == "learning" else Launch.run(launch))
    yield
    LAUNCHER.reset(token)


def int32(numbers: Sequence[int] | Int32Array) -> torch.Tensor:
    return torch.tensor(np.asarray(numbers, np.int32))


def text_of(trie: DeviceTrie, row: int) -> list[list[int]]:
    region = trie.layout.text
    return RegionView(trie.arena, row * region.size, region).sequences()


def region_of(trie: DeviceTrie, row: int) -> int:
    return state_of(trie, row, REGION)


def state_of(trie: DeviceTrie, row: int, field: int) -> int:
    return int(trie.arena[trie.layout.states + row * STATE + field])


def memory_in(trie: DeviceTrie, region: int) -> RegionView:
    layout = trie.layout
    return RegionView(trie.arena, layout.memories + region * layout.memory.size, layout.memory)


def weights_in(trie: DeviceTrie, region: int) -> Int32Array:
    begin = trie.layout.weights + region * trie.layout.weights_size
    numbers: Int32Array = trie.arena[begin : begin + trie.layout.weights_size].numpy()
    return numbers


def prompt(trie: DeviceTrie, row: int, tokens: Sequence[int]) -> None:
    trie.append_prompts(int32([row]), int32(tokens), int32([0, len(tokens)]))
    trie.begin_outputs(int32([row]))


def learn(trie: DeviceTrie, row: int, tokens: Sequence[int]) -> None:
    trie.learn(int32([row]), int32([tokens]), int32([len(tokens)]))  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("part", "memory", "written"),
    [("outputs", [[3, 4]], 2), ("prompts", [[1, 2]], (1 << 29) + 2), ("both", [[1, 2, 3, 4]], 4)],
)
def test_the_memory_learns_the_part_that_the_options_say(part: str, memory: list[list[int]], written: int) -> None:
    trie = DeviceTrie(SIZES, CPU, TrieOptions(learn=part))  # type: ignore[arg-type]
    trie.begin(1, "a")
    prompt(trie, 1, [1, 2])
    learn(trie, 1, [3, 4])
    assert text_of(trie, 1) == [[1, 2, 3, 4]]
    assert memory_in(trie, region_of(trie, 1)).sequences() == memory
    assert trie.tokens("a") == sum(map(len, memory))
    assert state_of(trie, 1, WRITTEN) == written
    assert state_of(trie, 1, PROMPT_END) == 2


def test_a_step_teaches_each_row_what_it_accepted() -> None:
    trie = DeviceTrie(SIZES, CPU)
    for row, tenant in enumerate(("a", "b", "a")):
        trie.begin(row, tenant)
    trie.begin(3, "a", learns=False)
    rows, tokens = int32([2, -1, 0, 1, 3]), torch.arange(15, dtype=torch.int32).view(5, 3)
    trie.learn(rows[[0, 2, 3, 4]], tokens[[0, 2, 3, 4]].contiguous(), int32([2, 3, 0, 1]))
    assert [text_of(trie, row) for row in range(4)] == [[[6, 7, 8]], [], [[0, 1]], [[12]]]
    assert sorted(memory_in(trie, region_of(trie, 0)).sequences()) == [[0, 1], [6, 7, 8]]
    assert trie.tokens("b") == 0


def test_a_row_that_begins_has_nothing_of_the_one_before() -> None:
    trie = DeviceTrie(SIZES, CPU)
    trie.begin(0, "a")
    prompt(trie, 0, [1, 2, 3])
    trie.end(0)
    assert region_of(trie, 0) == -1
    trie.begin(0, "b")
    assert text_of(trie, 0) == []
    assert state_of(trie, 0, PROMPT_END) == -1
    prompt(trie, 0, [7])
    assert text_of(trie, 0) == [[7]]


def test_a_region_goes_to_a_new_tenant_from_the_one_that_was_used_longest_ago() -> None:
    trie = DeviceTrie(SIZES, CPU)
    for row, tenant in enumerate("ab"):
        trie.begin(row, tenant)
        learn(trie, row, [row + 1] * 40)
    region = region_of(trie, 1)
    trie.end(0)
    trie.end(1)
    trie.begin(0, "a")
    trie.end(0)
    kept = memory_in(trie, 1 - region).all.copy()
    trie.begin(2, "c")
    assert region_of(trie, 2) == region
    assert (trie.tokens("a"), trie.tokens("b"), trie.tokens("c")) == (40, 0, 0)
    assert (memory_in(trie, 1 - region).all == kept).all()
    assert (memory_in(trie, region).heads == -1).all()


def test_rows_draft_from_their_own_texts_while_all_regions_have_live_rows() -> None:
    trie = DeviceTrie(SIZES, CPU)
    trie.begin(0, "a")
    trie.begin(1, "b")
    trie.begin(2, "c")
    before = trie.arena[trie.layout.memories : trie.layout.states].clone()
    prompt(trie, 2, [1, 2])
    learn(trie, 2, [3])
    trie.import_runs("c", [np.array([1, 2, 3], np.int32)])
    trie.purge("c")
    assert torch.equal(trie.arena[trie.layout.memories : trie.layout.states], before)
    assert text_of(trie, 2) == [[1, 2, 3]]
    assert (region_of(trie, 2), trie.tokens("c")) == (-1, 0)
    trie.end(0)
    trie.begin(3, "c")
    assert region_of(trie, 3) >= 0


def test_a_tenant_beyond_its_region_loses_its_oldest_text_and_no_other_does() -> None:
    trie = DeviceTrie(SIZES, CPU)
    trie.begin(0, "a")
    trie.begin(1, "b")
    learn(trie, 0, [9, 8, 7])
    other = memory_in(trie, region_of(trie, 0)).all.copy()
    for step in range(30):
        learn(trie, 1, [*range(100 * step, 100 * step + 50)])
    newest = [100 * step + i for step in range(30) for i in range(50)][-trie.tokens("b") :]
    assert trie.tokens("b") > 512 - 2 * 16
    assert memory_in(trie, region_of(trie, 1)).sequences() == [newest]
    assert (memory_in(trie, region_of(trie, 0)).all == other).all()


def test_a_purged_tenant_begins_again_as_before_any_traffic() -> None:
    trie, fresh = DeviceTrie(SIZES, CPU), DeviceTrie(SIZES, CPU)
    for row, tenant in enumerate("ab"):
        trie.begin(row, tenant)
        learn(trie, row, [1, 2, 3])
    region, other = region_of(trie, 0), memory_in(trie, region_of(trie, 1)).all.copy()
    weights_in(trie, region)[:] = 7
    trie.purge("a")
    assert trie.tokens("a") == 0
    assert (memory_in(trie, region).log == -1).all()
    assert (memory_in(trie, region).heads == -1).all()
    assert (weights_in(trie, region) == weights_in(fresh, region)).all()
    learn(trie, 0, [4])
    assert memory_in(trie, region).sequences() == [[4]]
    assert text_of(trie, 0) == [[1, 2, 3, 4]]
    assert (memory_in(trie, region_of(trie, 1)).all == other).all()


def test_a_host_s_memory_and_weights_are_taken_over() -> None:
    strategy, trie, random = TrieStrategy(), DeviceTrie(SIZES, CPU), np.random.default_rng(0)
    for run in ([1, 2, 3, 4] * 30, [7, 7]):
        strategy.learn(np.array(run, np.int32))
    learned = strategy.weights
    for factors in (learned.features, learned.escapes):
        factors *= np.exp(random.normal(size=factors.shape))
    learned.odds[:] = random.normal(size=learned.odds.shape)
    learned.novel["token"], learned.novel["count"] = random.integers(0, 9, (2, COUNTED + 1))
    trie.import_runs("a", [*strategy.sequences()])
    trie.set_weights("a", strategy.weights)
    trie.begin(0, "a")
    region = region_of(trie, 0)
    assert sorted(memory_in(trie, region).sequences()) == [[1, 2, 3, 4] * 30, [7, 7]]
    numbers, host = weights_in(trie, region), strategy.weights
    factors = np.concatenate([host.features.reshape(-1), host.escapes])
    assert np.allclose(np.exp(numbers[: factors.size] / 2.0**UNIT_BITS), factors, rtol=2**-19)
    assert np.allclose(numbers[factors.size : ADDED] / 2.0**UNIT_BITS, host.odds, atol=2**-20)
    novel = numbers[2 * ADDED : 2 * ADDED + 2 * COUNTED + 1]
    assert novel[:COUNTED].tolist() == host.novel["token"][:COUNTED].tolist()
    assert novel[COUNTED:].view(np.float32).tolist() == host.novel["count"].tolist()


def test_the_same_calls_leave_the_same_bits() -> None:
    random = np.random.default_rng(3)
    steps = [random.integers(0, 6, (4, 20)) for _ in range(20)]
    arenas = []
    for _ in range(2):
        trie = DeviceTrie(SIZES, CPU)
        for row in range(4):
            trie.begin(row, "ab"[row % 2])
            prompt(trie, row, [1, 2, 3] * row + [4])
        for step in steps:
            trie.learn(int32([0, 1, 2, 3]), torch.tensor(step.astype(np.int32)), int32([3, 1, 20, 0]))
        arenas.append(trie.arena)
    assert torch.equal(*arenas)


@pytest.mark.parametrize("sizes", [{"rows": 0}, {"row_tokens": 63}, {"tenants": 0}, {"nodes": 65}, {"depth": 0}])
def test_sizes_that_are_not_allowed_are_named(sizes: dict[str, int]) -> None:
    [(name, value)] = sizes.items()
    with pytest.raises(ValueError, match=rf"^{name}: {value} is not allowed; it must be from \d+ to \d+$"):
        DeviceSizes(**{"rows": 4, "row_tokens": 256, "tenants": 2, "tenant_tokens": 512, **sizes})


def test_an_arena_that_does_not_fit_is_refused_with_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_trie, "_free_bytes", lambda device: 500_000_000)
    with pytest.raises(ArenaTooLargeError, match=r"the arena takes 2\.\d+ GB, and cpu has 0\.5 GB free"):
        DeviceTrie(DeviceSizes(1, 64, 1, 1 << 24), CPU)


def test_a_gpu_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", None)
    with pytest.raises(DeviceUnsupportedError, match="the package triton is not installed; torch for CUDA brings it"):
        DeviceTrie(SIZES, torch.device("cuda"))
