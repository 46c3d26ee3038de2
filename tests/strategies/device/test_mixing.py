"""Drafts of the mixture on the device are the host's from the same state, and what they learn is nearly the same."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.base import Feedback
from draftwood_strategies.device import launching
from draftwood_strategies.device.arena import (
    CLAIMED,
    DRAFTED,
    LEARNS,
    MIXED,
    REGION,
    SEEN_AT,
    TABLE_COLUMNS,
    TAIL,
    TOPS,
    TOPS_AT,
    UNIT_BITS,
    DeviceSizes,
)
from draftwood_strategies.device.calls import VerifiedTrees
from draftwood_strategies.device.mixture import DeviceMixture
from draftwood_strategies.device.trie import DeviceTrie, whole_mixture
from draftwood_strategies.draft import EMPTY_TREE, DraftTree, DraftTrees
from draftwood_strategies.mixing.mixture import Mixture, MixtureDrafter
from draftwood_strategies.successors import COLUMNS, NOWHERE, ORDERS, STEADY, TAG, WIDTH, WRITTEN, SuccessorTable
from tests.strategies.device.arenas import CPU, drafted, int32
from tests.strategies.device.test_drafting import assert_alike
from tests.strategies.test_batches import joined
from tests.strategies.toy_model import ToyModel

CONTEXTS = 1024


def source_tree(random: np.random.Generator, vocab: int, most: int) -> DraftTree:
    """Of a trie: nodes by falling scores."""
    nodes: list[tuple[float, int, int]] = []
    left, seen = [1.0], set[tuple[int, int]]()
    for _ in range(int(random.integers(0, most + 1))):
        parent, token = int(random.integers(-1, len(nodes))), int(random.integers(0, vocab))
        if (parent, token) in seen:
            continue
        seen.add((parent, token))
        share = left[parent + 1] * float(random.uniform(0.02, 0.95))
        left[parent + 1] -= share
        nodes.append((share, token, parent))
        left.append(share)
    order = sorted(range(len(nodes)), key=lambda i: -nodes[i][0])
    place = {node: at for at, node in enumerate(order)} | {-1: -1}
    return DraftTree(
        np.array([nodes[i][1] for i in order], np.int32),
        np.array([place[nodes[i][2]] for i in order], np.int32),
        np.array([nodes[i][0] for i in order], np.float32),
    )


def with_history(mixture: Mixture, random: np.random.Generator, vocab: int, budget: int, steps: int) -> MixtureDrafter:
    models = [ToyModel(int(random.integers(1000)), max(vocab, WIDTH)) for _ in range(2)]
    text = random.integers(0, vocab, random.integers(1, 6)).tolist()
    drafter = MixtureDrafter(mixture, np.array(text, np.int32))
    for _ in range(steps):
        tree = drafter.draft([source_tree(random, vocab, budget)], budget)
        written, feedback = models[int(random.integers(4) == 0)].verify(text, tree)
        drafter.observe(np.array(written, np.int32), feedback)
        text += written
    return drafter


def arena_of(
    tenants: list[tuple[Mixture, list[MixtureDrafter]]], trees: list[DraftTree]
) -> tuple[DeviceTrie, DeviceMixture]:
    """With the tables and weights of some tenants, their live sequences in one row after the other, and `trees` in the
    place of the trie's drafts."""
    rows = [(number, drafter) for number, (_, drafters) in enumerate(tenants) for drafter in drafters]
    trie = DeviceTrie(DeviceSizes(len(rows), 64, len(tenants), 64, contexts=CONTEXTS), CPU)
    mixture, layout = DeviceMixture(trie), trie.layout
    for row, ((number, drafter), tree) in enumerate(zip(rows, trees, strict=True)):
        trie.begin(row, f"tenant {number}")
        mixture.begin(row, np.array([1], np.int32))
        own, fields = mixture._rows[row].numpy(), drafter.struct.fields
        own[TAIL : TAIL + ORDERS] = fields.tail[::-1]
        own[TOPS] = tops = int(fields.state["tops"][0])
        own[TOPS_AT : TOPS_AT + tops * WIDTH] = fields.top[:tops].reshape(-1)
        write_tree(trie, row, tree)
    for number, (host, _) in enumerate(tenants):
        weights = trie._weights[trie._regions[f"tenant {number}"]].numpy()
        weights[layout.mixture : layout.mixture + MIXED] = whole_mixture(host.weights)
        if host.table is not None:
            table_in(trie, f"tenant {number}")[:, :COLUMNS] = host.table.rows
    return trie, mixture


def table_in(trie: DeviceTrie, tenant: str) -> Int32Array:
    """int32[CONTEXTS, TABLE_COLUMNS], of a tenant."""
    weights: Int32Array = trie._weights[trie._regions[tenant]].numpy()
    return weights[trie.layout.table :].reshape(-1, TABLE_COLUMNS)


def write_tree(trie: DeviceTrie, row: int, tree: DraftTree) -> None:
    """In the place of the trie's draft."""
    layout, nodes = trie.layout, trie.layout.sizes.nodes
    kept = trie.arena.numpy()[layout.drafts + row * layout.draft_size :]
    n = tree.tokens.size
    kept[:n], kept[nodes : nodes + n] = tree.tokens, tree.parents
    kept[4 * nodes : 4 * nodes + n] = tree.scores.view(np.int32)
    trie._states[row, DRAFTED] = n


def check_batches(seeds: range) -> None:
    for seed in seeds:
        random = np.random.default_rng(seed)
        vocab, budget = int(random.choice([3, 12, 60])), int(random.choice([1, 5, 16, 33, 64]))
        model_table = SuccessorTable(CONTEXTS)
        for each in random.integers(0, vocab, (20, 3)).astype(np.int32):
            top = random.permutation(max(vocab, WIDTH))[:WIDTH].astype(np.int32)[None]
            tail = np.array([NOWHERE, *each], np.int32)
            model_table.update(tail, each[-1:], np.array([-1], np.int32), top)
        tenants = []
        for _ in range(2):
            host = Mixture(SuccessorTable(CONTEXTS))
            host.model_table = model_table.rows
            steps = random.integers(0, 12, 2).tolist()
            tenants.append((host, [with_history(host, random, vocab, budget, count) for count in steps]))
        trees = [source_tree(random, vocab, 64) for _ in range(4)]
        budgets = [budget, max(1, budget // 2), budget, 64]
        _, mixture = arena_of(tenants, trees)
        mixture.set_model_table(model_table.rows)
        found = drafted(mixture, budgets)
        hosts = [(host, drafter) for host, drafters in tenants for drafter in drafters]
        for tree, (host, drafter), source, nodes in zip(found, hosts, trees, budgets, strict=True):
            [expected] = host.draft_all([drafter], [DraftTrees.of([source])], np.array([nodes], np.int32))
            assert_alike(tree, expected)


def test_drafts_are_the_hosts() -> None:
    check_batches(range(8))


@pytest.mark.system
@pytest.mark.timeout(600)
def test_drafts_of_many_states_are_the_hosts() -> None:
    check_batches(range(8, 60))


def verified(feedbacks: list[Feedback]) -> VerifiedTrees:
    step = joined(feedbacks)
    begins = np.repeat(step.offsets[:-1], np.diff(step.offsets))
    parents = np.where(step.parents >= 0, step.parents + begins, -1)
    assert step.top_tokens is not None
    return VerifiedTrees(*map(int32, (step.tokens, parents, step.top_tokens, step.offsets)))


def learned(mixture: DeviceMixture, rows: list[int], written: list[list[int]], feedbacks: list[Feedback]) -> None:
    tokens = int32([[*each, *[0] * (64 - len(each))] for each in written])
    mixture.learn(int32(rows), tokens, int32([*map(len, written)]), int32(range(len(rows))), verified(feedbacks))


def contexts(rows: Int32Array) -> dict[int, tuple[list[int], int]]:
    """Of a table, by the hash of each context: its successors and how steady the best is."""
    return {int(row[TAG]): (row[:WIDTH].tolist(), int(row[STEADY])) for row in rows if row[WRITTEN] > 0}


@pytest.mark.parametrize("seed", range(3))
def test_a_step_teaches_what_it_teaches_the_host(seed: int) -> None:
    """Of one sequence: the weights but for the order of its tokens, and each context that comes once in the step."""
    random = np.random.default_rng(seed)
    host = Mixture(SuccessorTable(CONTEXTS))
    drafter = with_history(host, random, 12, 16, steps=2 + 5 * seed)
    source, model = source_tree(random, 12, 16), ToyModel(seed, 12)
    trie, mixture = arena_of([(host, [drafter])], [source])
    [tree], expected = drafted(mixture, [16]), drafter.draft([source], 16)
    assert_alike(tree, expected)
    text = drafter.tail[drafter.tail >= 0].tolist()
    written, feedback = model.verify(text, expected)
    tenant = trie._weights[trie._regions["tenant 0"], trie.layout.mixture :].numpy()
    before = tenant[:MIXED].copy()
    learned(mixture, [0], [written], [feedback])
    drafter.observe(np.array(written, np.int32), feedback)
    found, wanted = tenant[:MIXED], whole_mixture(host.weights)
    changed = wanted != before
    assert changed[:SEEN_AT].sum() > 3
    assert np.array_equal(found[SEEN_AT:], wanted[SEEN_AT:])
    np.testing.assert_allclose(
        found[:SEEN_AT][changed[:SEEN_AT]], wanted[:SEEN_AT][changed[:SEEN_AT]], atol=0.02 * (1 << UNIT_BITS)
    )
    assert not tenant[MIXED : 2 * MIXED].any()
    assert host.table is not None
    own, hosts = contexts(table_in(trie, "tenant 0")), contexts(host.table.rows)
    assert not table_in(trie, "tenant 0")[:, CLAIMED].any()
    same = sum(own.get(context) == row for context, row in hosts.items())
    assert own.keys() <= hosts.keys()
    assert same >= 0.8 * len(hosts)
    row = mixture._rows[0].numpy()
    assert row[TAIL : TAIL + ORDERS][::-1].tolist() == drafter.tail.tolist()
    tops = feedback.top_tokens
    assert tops is not None
    assert row[TOPS] == tops.shape[0]
    assert row[TOPS_AT : TOPS_AT + tops.size].tolist() == tops.reshape(-1).tolist()


def test_no_row_mixes_two_contexts_and_the_order_of_programs_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many sequences of a tenant write a table with few rows at once, beside another tenant's, and one is read-only."""
    hosts = [Mixture(SuccessorTable(CONTEXTS)) for _ in range(2)]
    tenants = [(host, [MixtureDrafter(host, np.array([1], np.int32)) for _ in range(8)]) for host in hosts]
    arenas = []
    for programs in (product, lambda *axes: reversed([*product(*axes)])):
        monkeypatch.setattr(launching, "product", programs)
        random = np.random.default_rng(0)
        trie, mixture = arena_of(tenants, [source_tree(random, 400, 16) for _ in range(16)])
        trie._states[7, LEARNS] = 0
        other = trie._weights[trie._regions["tenant 1"]].clone()
        for _ in range(12):
            drafted(mixture, [16] * 8)
            chains = random.integers(0, 400, (8, 16)).astype(np.int32)
            best = random.integers(0, 400, (8, 16, 1)).astype(np.int32) * WIDTH
            steps = [
                Feedback(
                    tokens=chain,
                    parents=np.arange(-1, 15, dtype=np.int32),
                    predictions=of_chain[:, 0],
                    top_tokens=of_chain + np.arange(WIDTH, dtype=np.int32) + np.int32(5 * (row == 7)),
                )
                for row, (chain, of_chain) in enumerate(zip(chains, best, strict=True))
            ]
            learned(mixture, [*range(8)], [chain[1:5].tolist() for chain in chains], steps)
        table = table_in(trie, "tenant 0")
        used = table[table[:, WRITTEN] > 0]
        assert used.shape[0] > 0.9 * CONTEXTS
        assert len({*used[:, TAG].tolist()}) == used.shape[0]
        assert (used[:, :WIDTH] == used[:, :1] + np.arange(WIDTH)).all()
        assert not (used[:, 0] % WIDTH).any()
        assert torch.equal(trie._weights[trie._regions["tenant 1"]], other)
        arenas.append(trie.arena)
    assert torch.equal(*arenas)


def test_unused_nodes_are_filled_without_a_region_and_nothing_is_learned() -> None:
    host = Mixture(SuccessorTable(CONTEXTS))
    trie, mixture = arena_of(
        [(host, [MixtureDrafter(host, np.array([1], np.int32))])], [source_tree(np.random.default_rng(1), 9, 5)]
    )
    trie._states[0, REGION] = -1
    top = np.arange(16, dtype=np.int32).reshape(2, WIDTH)
    step = Feedback(
        tokens=np.array([1, 9], np.int32), parents=np.array([-1, 0], np.int32), predictions=top[:, 0], top_tokens=top
    )
    before = trie._weights.clone()
    learned(mixture, [0], [[5, 6]], [step])
    assert torch.equal(trie._weights, before)
    write_tree(trie, 0, EMPTY_TREE)
    [tree] = drafted(mixture, [20])
    assert tree.tokens.tolist() == [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]
    assert (tree.parents == -1).all()
