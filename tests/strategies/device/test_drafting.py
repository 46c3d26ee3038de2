"""Drafts on the device are the host's, from the same state."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draftwood_strategies.arrays import Float32Array, Int32Array
from draftwood_strategies.device.arena import ADDED, BACKS_OFF, UNIT_BITS
from draftwood_strategies.device.trie import DeviceTrie
from draftwood_strategies.draft import DraftTree, DraftTrees
from draftwood_strategies.draft_engine.worth import best_chains
from tests.strategies.device.arenas import arena_of, drafted, fixed_sizes, host_trie, int32, space, with_history
from tests.strategies.test_draft import paths

_TOLERANCE = 2e-5
"""Weights are rounded, and sums of floats have another order."""


@pytest.fixture(autouse=True)
def _regions(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed_sizes(monkeypatch)


def assert_alike(device: DraftTree, host: DraftTree) -> None:
    """The same nodes with the same scores. Where several score as little as the worst, either may be drafted."""
    found, wanted = paths(device), paths(host)
    assert len(found) == len(wanted)
    worst = min(wanted.values(), default=0.0) + _TOLERANCE
    for path in found.keys() | wanted.keys():
        score = found.get(path), wanted.get(path)
        if None in score:
            assert max(filter(None, score)) <= worst, (path, score)
        else:
            assert score[0] == pytest.approx(score[1], abs=_TOLERANCE), path


def check_batches(seeds: range) -> None:
    """Four rows of two tenants in each batch, with other vocabularies and budgets."""
    for seed in seeds:
        random = np.random.default_rng(seed)
        vocab, budget = int(random.choice([3, 12, 60, 400])), int(random.choice([1, 5, 16, 33, 64]))
        tenants = [
            (strategy, [with_history(strategy, random, vocab, budget) for _ in range(2)])
            for strategy in (host_trie(), host_trie())
        ]
        drafters = [drafter for _, each in tenants for drafter in each]
        budgets = [budget, max(1, budget // 2), budget, 64]
        trees = drafted(arena_of(tenants), budgets)
        for tree, drafter, nodes in zip(trees, drafters, budgets, strict=True):
            assert_alike(tree, drafter.propose(nodes))


def test_drafts_are_the_hosts() -> None:
    check_batches(range(6))


@pytest.mark.system
@pytest.mark.timeout(600)
def test_drafts_of_many_states_are_the_hosts() -> None:
    check_batches(range(6, 56))


def test_a_chain_is_the_best_path_of_the_tree() -> None:
    random = np.random.default_rng(1)
    strategy = host_trie()
    drafter = with_history(strategy, random, 12, 64)
    trie = arena_of([(strategy, [drafter])])
    tree = drafter.propose(64)
    for length in (1, 3, 64):
        out = space(1)
        trie.propose_chains(int32([0]), int32([length]), out.tokens, out.scores, out.counts)
        count = int(out.counts[0])
        # The device draws no tree that is deeper than the chain may be, so it may know a better one.
        [host] = best_chains(DraftTrees.of([tree]), np.array([length], np.int32))
        assert 1 <= count <= length
        assert float(out.scores[0, :count].sum()) >= float(host.scores.sum()) - _TOLERANCE * length
        scores = out.scores[0, :count].numpy()
        assert (scores[1:] <= scores[:-1]).all()


def test_rows_that_are_padding_or_have_no_text_have_no_draft() -> None:
    random = np.random.default_rng(2)
    strategy = host_trie()
    trie = arena_of([(strategy, [with_history(strategy, random, 12, 16)])])
    before, out = trie.arena.clone(), space(3)
    trie.propose(int32([-1, -1, -1]), int32([16, 16, 0]), out)
    assert out.counts.tolist() == [0, 0, 0]
    assert torch.equal(trie.arena, before)
    trie.begin(0, "another")
    assert drafted(trie, [16])[0].tokens.size == 0


def learned(trie: DeviceTrie, row: int, tokens: Int32Array) -> None:
    trie.learn(int32([row]), int32(tokens[None]), int32([tokens.size]))


def weights_of(trie: DeviceTrie, tenant: str) -> Float32Array:
    """Of votes, escapes and odds."""
    numbers = trie._weights[trie._regions[tenant], :ADDED].numpy()
    return (numbers / float(1 << UNIT_BITS)).astype(np.float32)


@pytest.mark.parametrize("seed", range(4))
def test_one_token_teaches_what_it_teaches_the_host(seed: int) -> None:
    """With one token of one row nothing depends on the order but the odds of siblings."""
    random = np.random.default_rng(seed)
    strategy = host_trie()
    drafter = with_history(strategy, random, 12, 16)
    trie = arena_of([(strategy, [drafter])])
    [tree] = drafted(trie, [16])
    drafter.propose(16)
    token = np.array([random.choice(tree.tokens[tree.parents < 0]) if seed % 2 else 11], np.int32)
    before = weights_of(trie, "tenant 0")
    learned(trie, 0, token)
    drafter.observe(token, None)
    found, host = weights_of(trie, "tenant 0"), strategy.weights
    factors = np.log(np.concatenate([host.features.reshape(-1), host.escapes]))
    assert not np.array_equal(found, before)
    np.testing.assert_allclose(found[: factors.size], factors, atol=2e-5)
    np.testing.assert_allclose(found[factors.size :], host.odds, atol=2e-2)
    [device], best = drafted(trie, [1]), drafter.propose(1)
    assert device.tokens.tolist() == best.tokens.tolist()
    assert device.scores[0] == pytest.approx(best.scores[0], rel=1e-2)


def test_two_arenas_that_are_fed_the_same_are_the_same() -> None:
    """As on the GPUs of a tensor-parallel group, several rows of a tenant in a step."""
    arenas = []
    for _ in range(2):
        random = np.random.default_rng(5)
        strategy = host_trie()
        trie = arena_of([(strategy, [with_history(strategy, random, 12, 16) for _ in range(3)])])
        for _ in range(3):
            drafted(trie, [16, 16, 16])
            trie.learn(int32([2, 0, 1]), int32(random.integers(0, 12, (3, 4))), int32([4, 1, 0]))
        arenas.append(trie.arena)
    assert torch.equal(*arenas)


def test_what_a_tenant_learns_leaves_the_others_as_they_are() -> None:
    random = np.random.default_rng(6)
    tenants = [(strategy, [with_history(strategy, random, 12, 16)]) for strategy in (host_trie(), host_trie())]
    trie = arena_of(tenants)
    region = trie._regions["tenant 1"]
    before = trie._memories[region].clone(), trie._weights[region].clone(), trie._texts[1].clone()
    drafted(trie, [16, 16])
    learned(trie, 0, np.arange(9, dtype=np.int32))
    after = trie._memories[region], trie._weights[region], trie._texts[1]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_a_row_that_does_not_back_off_drafts_only_what_was_written() -> None:
    random = np.random.default_rng(8)
    strategy = host_trie()
    drafter = with_history(strategy, random, 60, 64)
    assert strategy.weights.novel["count"][0] > 0
    trie = arena_of([(strategy, [drafter])])
    backs_off = drafted(trie, [64])[0]
    trie._states[0, BACKS_OFF] = 0
    without = drafted(trie, [64])[0]
    strategy.backs_off = False
    assert_alike(without, drafter.propose(64))
    assert paths(without).keys() != paths(backs_off).keys()
