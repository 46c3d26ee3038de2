"""Drafts of the mixture on the device are the host's from the same state, and what they learn is nearly the same."""

from __future__ import annotations

import numpy as np
import torch

from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.base import Feedback
from draftwood_strategies.device.arena import (
    DRAFTED,
    MIXED,
    TABLE_COLUMNS,
    TAIL,
    TOPS,
    TOPS_AT,
    DeviceSizes,
)
from draftwood_strategies.device.mixture import DeviceMixture
from draftwood_strategies.device.trie import DeviceTrie, whole_mixture
from draftwood_strategies.draft import DraftTree, DraftTrees
from draftwood_strategies.mixing.mixture import Mixture, MixtureDrafter
from draftwood_strategies.successors import COLUMNS, NOWHERE, ORDERS, WIDTH, SuccessorTable
from tests.strategies.device.test_drafting import assert_alike, space

CONTEXTS = 1024
CPU = torch.device("cpu")


class Successors:
    """A model whose most probable tokens depend on the last two."""

    def __init__(self, random: np.random.Generator, vocab: int) -> None:
        self._random, self._vocab = random, vocab
        self._known: dict[tuple[int, ...], Int32Array] = {}

    def top(self, context: tuple[int, ...]) -> Int32Array:
        if context[-2:] not in self._known or self._random.random() < 0.1:
            self._known[context[-2:]] = self._random.permutation(max(self._vocab, WIDTH))[:WIDTH].astype(np.int32)
        return self._known[context[-2:]]

    def verify(self, text: list[int], tree: DraftTree) -> tuple[list[int], Feedback]:
        """What is accepted of a tree, and the feedback."""
        tokens = np.concatenate([[text[-1]], tree.tokens]).astype(np.int32)
        parents = np.concatenate([[-1], tree.parents + 1]).astype(np.int32)
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
            paths.append((*(paths[parent] if parent >= 0 else text[-2:-1]), token))
        top = np.array([self.top(path) for path in paths], np.int32)
        written, node = [int(top[0, 0])], 0
        while children := [i for i in range(len(tokens)) if parents[i] == node and tokens[i] == written[-1]]:
            [node] = children
            written.append(int(top[node, 0]))
        return written, Feedback(tokens=tokens, parents=parents, predictions=top[:, 0].copy(), top_tokens=top)


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
    model = Successors(random, vocab)
    text = random.integers(0, vocab, random.integers(1, 6)).tolist()
    drafter = MixtureDrafter(mixture, np.array(text, np.int32))
    for _ in range(steps):
        tree = drafter.draft([source_tree(random, vocab, budget)], budget)
        written, feedback = model.verify(text, tree)
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
    mixture, layout, arena = DeviceMixture(trie), trie.layout, trie.arena.numpy()
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
    assert arena.shape[0] == layout.size
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


def drafted(mixture: DeviceMixture, budgets: list[int]) -> list[DraftTree]:
    """The drafts of the rows 0, 1, ...; checked."""
    out = space(len(budgets))
    mixture.propose(torch.arange(len(budgets), dtype=torch.int32), torch.tensor(budgets, dtype=torch.int32), out)
    trees = [DraftTree(*(part[row, :count].numpy().copy() for part in out[:3])) for row, count in enumerate(out.counts)]
    for tree in trees:
        tree.check()
    return trees


def check_batches(seeds: range) -> None:
    for seed in seeds:
        random = np.random.default_rng(seed)
        vocab, budget = int(random.choice([3, 12, 60, 400])), int(random.choice([1, 5, 16, 33, 64]))
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
