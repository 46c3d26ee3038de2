"""The trie on a device as a strategy: the host's protocol, and the drafts of the host's trie."""

from __future__ import annotations

import gc
import threading
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from draftwood_strategies import create
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.base import (
    Feedback,
)
from draftwood_strategies.built_in import TrieOptions
from draftwood_strategies.device import draft_device
from draftwood_strategies.device import strategy as device_strategy
from draftwood_strategies.device.arena import CLOCK_AT, DeviceSizes
from draftwood_strategies.device.draft_device import DeviceParts, DraftDevice
from draftwood_strategies.device.strategy import DeviceStrategy
from draftwood_strategies.draft import DraftTree, checked_all
from draftwood_strategies.successors import SuccessorTable
from draftwood_strategies.trie.phrase_index import PhraseIndex
from draftwood_strategies.trie.strategy import TrieStrategy
from tests.strategies.arrays import ids
from tests.strategies.toy_model import ToyModel, run

TEXT = np.arange(40, dtype=np.int32) % 13 + 1
OTHER = np.arange(40, dtype=np.int32) % 7 + 20


def arena(rows: int = 4, tenants: int = 3, **options: Any) -> DraftDevice:
    sizes = DeviceSizes(rows, row_tokens=512, tenants=tenants, tenant_tokens=1024, nodes=16, contexts=1024)
    return DraftDevice(sizes, torch.device("cpu"), TrieOptions(**options))


def write(strategy: Any, text: Int32Array, prompt: int = 4) -> None:
    """As a sequence that is never drafted for."""
    drafter = strategy.start(text[:prompt])
    drafter.observe(text[prompt:], None)
    drafter.close()


def stored(strategy: Any) -> list[list[int]]:
    return [sequence.tolist() for sequence in strategy.sequences()]


def assert_alike(found: DraftTree, expected: DraftTree) -> None:
    """The same nodes; their scores differ by rounding."""
    found.check()
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.parents.tolist() == expected.parents.tolist()
    assert np.allclose(found.scores, expected.scores, atol=1e-4)


def weights_of(strategy: DeviceStrategy) -> torch.Tensor:
    weights = strategy.weights_on_device()
    assert weights is not None
    return weights


NAMES = ["trie", "recycling", "hybrid"]
MIXING = NAMES[1:]


@pytest.mark.parametrize("part", ["outputs", "prompts", "both"])
@pytest.mark.parametrize("seed", range(2))
def test_it_drafts_what_the_host_s_trie_drafts_from_the_same_history(part: str, seed: int) -> None:
    """Before a step has changed the weights. The host's hash tables have the size of the device's."""
    random = np.random.default_rng(seed)
    phrases = [random.integers(0, 30, 6, dtype=np.int32) for _ in range(5)]

    def text(count: int) -> Int32Array:
        return np.concatenate([phrases[i] for i in random.integers(0, 5, count)])

    device, host = DeviceStrategy(arena(learn=part), learn=part), TrieStrategy(learn=part)
    host.memory = PhraseIndex(1024, 1024)
    for _ in range(4):
        recorded, written = text(5), text(8)
        for strategy in (device, host):
            strategy.learn(recorded)
            write(strategy, written, prompt=10)
    assert stored(device) == stored(host)
    for _ in range(3):
        prompt, output = text(4), text(1)
        drafters = device.start(prompt), host.start(prompt)
        for drafter in drafters:
            drafter.observe(output[:2], None)
        assert_alike(*(drafter.propose(12) for drafter in drafters))
        for drafter in drafters:
            drafter.close()
    assert stored(device) == stored(host)
    assert device.tokens == host.tokens


@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_valid_and_accepted_as_often_as_the_host_s(name: str) -> None:
    lengths = []
    for strategy in (DeviceStrategy(arena(), name), create(name)):
        assert strategy.top_k == (0 if name == "trie" else 8)
        steps = [len(run(ToyModel(vocab=12), strategy.start(ids(1, 2)), [1, 2], 40, budget=8)) for _ in range(2)]
        assert steps[1] < steps[0]
        lengths.append(sum(steps))
    assert lengths[0] <= 1.1 * lengths[1]


@pytest.mark.parametrize("name", MIXING)
def test_tenants_never_see_the_successors_of_others(name: str) -> None:
    """Nor after a purge, which makes a new instance, those of their own."""
    device = arena()
    tenants = {first: DeviceStrategy(device, name) for first in (100, 200)}
    context = ids(1, 2, 3, 4)
    for _ in range(2):
        for first, strategy in tenants.items():
            drafter, tops = strategy.start(context), np.arange(first, first + 8, dtype=np.int32)[None]
            feedback = Feedback(tokens=context[-1:], parents=ids(-1), predictions=ids(first), top_tokens=tops)
            drafter.propose(8)
            drafter.observe(ids(first + 9), feedback)
            drafter.close()
    drafters = [strategy.start(context) for strategy in (*tenants.values(), DeviceStrategy(device, name))]
    trees = [drafter.propose(16) for drafter in drafters]
    of_text = {*context.tolist(), 109, 209} if name == "hybrid" else set()
    for tree, first in zip(trees, tenants, strict=False):
        assert first in tree.tokens
        assert {*tree.tokens.tolist()} <= {*range(first, first + 10)} | (of_text - {309 - first})
    assert {*trees[2].tokens.tolist()} <= {*context.tolist()}


@pytest.mark.parametrize("name", MIXING)
def test_contexts_that_the_tenant_has_not_are_the_model_s(name: str) -> None:
    strategy, table = DeviceStrategy(arena(), name), SuccessorTable(1024)
    tail = ids(1, 2, 3, 4)
    assert strategy.nbytes == 0
    table.update(tail, tail[-1:], ids(-1), np.arange(50, 58, dtype=np.int32)[None])
    assert strategy.start(tail).propose(8).tokens.size == 0
    strategy.set_model_table(np.zeros((3, 5), np.int32))  # has no such layout
    strategy.set_model_table(table.rows)
    assert 50 in strategy.start(tail).propose(8).tokens
    assert strategy.nbytes == 4 * strategy.device.trie.layout.weights_size


def test_tenants_never_see_what_others_wrote() -> None:
    device = arena()
    one, other = DeviceStrategy(device), DeviceStrategy(device)
    write(one, TEXT)
    write(other, OTHER)
    for strategy, text in ((one, TEXT), (other, OTHER)):
        drafted = strategy.start(ids(99)), strategy.start(text[:9])
        trees = strategy.propose_all(drafted, np.full(2, 16, np.int32))
        assert len(trees[1]) > 0
        assert set(trees.tokens.tolist()) <= {*text.tolist(), 99}
        assert stored(strategy) == [text[4:].tolist()]


def test_after_a_purge_nothing_is_known_and_live_sequences_go_on() -> None:
    """A purge makes a new instance."""
    device = arena()
    purged = DeviceStrategy(device)
    write(purged, TEXT)
    live = purged.start(TEXT[:20])
    following = DeviceStrategy(device)
    assert following.start(ids(5, 6)).propose(16).tokens.size == 0
    assert (following.tokens, stored(following)) == (0, [])
    assert live.propose(16).tokens[0] == TEXT[20]
    live.observe(TEXT[20:22], None)
    live.close()
    assert following.tokens == 0


def test_a_batch_is_drafted_and_learned_in_one_call_each() -> None:
    strategy, model, random = DeviceStrategy(arena()), ToyModel(vocab=12), np.random.default_rng(0)
    texts = [[1, 2], [3, 4, 5], [6]]
    drafters, budgets = [strategy.start(ids(*text)) for text in texts], np.array([5, 99, 1], np.int32)
    for _ in range(6):
        rows = random.permutation(3)[: random.integers(1, 4)].tolist()
        found = strategy.propose_all([drafters[row] for row in rows], budgets[rows])
        checked_all(found, np.minimum(budgets[rows], 16), 12)
        written = [model.verify(texts[row], found[at])[0] for at, row in enumerate(rows)]
        for row, tokens in zip(rows, written, strict=True):
            texts[row] += tokens
        offsets = np.cumsum([0, *map(len, written)], dtype=np.int32)
        strategy.observe_all(
            [drafters[row] for row in rows], np.concatenate([ids(*tokens) for tokens in written]), offsets
        )
    outputs = [text[begin:] for text, begin in zip(texts, (2, 3, 1), strict=True) if text[begin:]]
    assert sorted(stored(strategy)) == sorted(outputs)


def test_a_prompt_is_indexed_in_pieces_and_what_was_written_meanwhile_comes_after_it() -> None:
    device, host = DeviceStrategy(arena(learn="both"), learn="both"), TrieStrategy(learn="both")
    prompt, trees = TEXT[:30], []
    for strategy in (device, host):
        drafter = strategy.start(prompt)
        done = [drafter.index_prompt(7) for _ in range(3)]
        drafter.observe(ids(5, 6), None)
        while done[-1] == 7:
            done.append(drafter.index_prompt(7))
        # The memory has 21 of the prompt, and the rest of it before the answer.
        assert done == [7, 7, 7, 7, 7, 7, 7, 2]
        assert drafter.index_prompt(7) == 0
        assert stored(strategy) == [[*prompt.tolist(), 5, 6]]
        trees.append(drafter.propose(8))
    assert_alike(*trees)
    ends = device.start(OTHER)  # before its prompt is indexed
    ends.index_prompt(3)
    ends.observe(ids(7, 8), None)
    ends.close()
    assert stored(device)[-1] == [*OTHER.tolist(), 7, 8]


@pytest.mark.parametrize("name", ["trie", "hybrid"])
def test_read_only_sequences_draft_and_change_nothing(name: str) -> None:
    """But the number of steps."""
    device = arena()
    strategy = DeviceStrategy(device, name)
    write(strategy, TEXT)
    layout = device.trie.layout
    before = device.trie.arena[layout.memories : layout.states].clone()
    drafter = strategy.start_read_only(TEXT[:9])
    tree = drafter.propose(16)
    assert len(tree) > 0
    written, feedback = ToyModel(vocab=60).verify(TEXT[:9].tolist(), tree)
    drafter.observe(ids(*written), feedback)
    drafter.propose(16)
    drafter.observe(OTHER[6:9], None)
    drafter.close()
    clock = layout.weights - layout.memories + torch.arange(4) * layout.weights_size + layout.mixture + CLOCK_AT
    before[clock] = device.trie.arena[layout.memories :][clock]
    assert torch.equal(device.trie.arena[layout.memories : layout.states], before)


def test_without_a_free_row_nothing_is_drafted_and_the_answer_is_learned_at_its_end() -> None:
    strategy = DeviceStrategy(arena(rows=1))
    first, second = strategy.start(TEXT[:20]), strategy.start(TEXT[:20])
    trees = strategy.propose_all([second, first], np.full(2, 16, np.int32))
    assert (len(trees[0]), len(trees[1])) == (0, 13)
    assert second.index_prompt(5) == 0
    assert second.propose(16).tokens.size == 0
    second.observe(ids(3), None)
    strategy.observe_all([second, first], ids(4, 5, 1), ids(0, 2, 3))
    second.close()
    first.close()
    assert sorted(stored(strategy)) == [[1], [3, 4, 5]]
    assert len(strategy.start(TEXT[:20]).propose(16)) == 16


def test_a_strategy_that_is_dropped_frees_its_region_and_its_rows() -> None:
    device = arena(rows=1, tenants=1)
    strategy = DeviceStrategy(device)
    strategy.start(TEXT)
    del strategy
    gc.collect()
    following = DeviceStrategy(device)
    write(following, OTHER)
    assert stored(following) == [OTHER[4:].tolist()]


@pytest.mark.parametrize("name", ["trie", "hybrid"])
def test_a_tenant_that_loses_its_region_gets_what_it_learned_back(name: str) -> None:
    device = arena(tenants=1)
    one, other = DeviceStrategy(device, name), DeviceStrategy(device)
    run(ToyModel(vocab=12), one.start(ids(1, 2)), [1, 2], count=8, budget=8)
    before, weights = stored(one), weights_of(one)
    write(other, OTHER)  # while the other has a live sequence
    assert stored(other) == [OTHER[4:].tolist()]
    device.trie.end(0)
    other.start(ids(1)).close()
    assert (device.trie.tokens("0"), device.trie.tokens("1")) == (0, 36)
    assert stored(one) == before
    assert torch.equal(weights_of(one), weights)
    assert stored(other) == [OTHER[4:].tolist()]


def test_recorded_sequences_of_any_thread_are_learned_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_strategy, "_IMPORTED", 50)
    strategy = DeviceStrategy(arena())
    thread = threading.Thread(target=lambda: [*map(strategy.learn, [TEXT[:30]] * 5)])
    thread.start()
    thread.join()
    tenant, trie = "0", strategy.device.trie
    drafter = strategy.start(TEXT[:5])
    assert trie.tokens(tenant) == 60
    drafter.propose(4)
    assert trie.tokens(tenant) == 120
    assert strategy.tokens == 150
    for _ in range(60):
        strategy.learn(TEXT)
    assert strategy.nbytes == 4 * trie.layout.memory.size
    assert 800 < strategy.tokens <= 1024


@pytest.mark.parametrize("name", NAMES)
def test_a_rebuilt_memory_goes_on_with_what_the_earlier_one_learned_besides(name: str) -> None:
    device = arena()
    earlier, rebuilt = DeviceStrategy(device, name), DeviceStrategy(device, name)
    rebuilt.keep_learned(earlier)
    drafter = earlier.start(ids(1, 2))
    fresh = weights_of(earlier)
    run(ToyModel(vocab=12), drafter, [1, 2], count=12, budget=8)
    rebuilt.start(ids(1))
    weights = weights_of(earlier)
    assert not torch.equal(weights, fresh)
    assert bool(weights[device.trie.layout.table :].any()) is (name != "trie")
    assert torch.equal(weights_of(rebuilt), weights)
    with pytest.raises(TypeError, match="those of TrieStrategy are not"):
        rebuilt.keep_learned(TrieStrategy())  # type: ignore[arg-type]


def test_options_that_differ_from_the_arena_s_are_refused() -> None:
    device = arena()
    assert device.takes(DeviceParts(TrieOptions(capacity_tokens=1024), None))
    options = ({"learn": "both"}, {"branch_length": 8}, {"prompt_weight": 2.0}, {"capacity_tokens": 512})
    others: list[tuple[str, Any]] = [*product(("trie", "hybrid"), options), ("jacobi", {})]
    for name, given in [*others, ("hybrid", {"sources": "trie,jacobi"})]:
        with pytest.raises(ValueError, match="does not take"):
            DeviceStrategy(device, name, **given)
    with pytest.raises(ValueError, match=r"^learn"):
        DeviceStrategy(device, learn="all")


def test_uploads_begin_where_kernels_were_compiled_for() -> None:
    device = arena()
    parts = device._uploaded(ids(1), ids(2, 3, 4, 5, 6), ids(7))
    assert [part.tolist() for part in parts] == [[1], [2, 3, 4, 5, 6], [7]]
    assert [(part.data_ptr() - parts[0].data_ptr()) % 16 for part in parts] == [0, 0, 0]
    assert draft_device._WIDTH * 4 % 16 == 0
