"""Triton's own interpreter leaves the same bits as kernels run by NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from draftwood_model_runner.runners.model_calls import setting
from draftwood_strategies.device.arena import DeviceSizes
from draftwood_strategies.device.calls import VerifiedTrees
from draftwood_strategies.device.choice import DeviceChoice
from draftwood_strategies.device.launching import LAUNCHER, Launch
from draftwood_strategies.device.mixture import DeviceMixture
from draftwood_strategies.device.trie import DeviceDrafts, DeviceTrie
from draftwood_strategies.mixing.mixture import Mixture
from draftwood_strategies.successors import SuccessorTable
from tests.model_runner.runners.cuda.device import DEVICE
from tests.strategies.device import test_mixing
from tests.strategies.device.arenas import arena_of, fixed_sizes, host_trie, space, with_history
from tests.strategies.device.test_appending import random_steps, trie_of, write
from tests.strategies.device.test_mixing import CONTEXTS


def written_arena() -> torch.Tensor:
    """Of texts and memories that have wrapped around, and recorded sequences."""
    trie = trie_of(DeviceSizes(4, 64, 2, 256), "abaa")
    for runs in random_steps(0, rows=4, steps=8, longest=20):
        write(trie, runs)
    trie.import_runs("b", [np.array(run, np.int32) for run in ([1, 2, 3] * 10, [1, 2], [5] * 20)])
    return trie.arena


@pytest.mark.skipif(DEVICE.type != "cpu", reason="its arena is on the CPU")
def test_numpy_and_triton_append_the_same() -> None:
    with setting(LAUNCHER, Launch.run_by_triton):
        interpreted = written_arena()
    assert torch.equal(interpreted, written_arena())


def drafted_arena(device: torch.device) -> dict[str, torch.Tensor]:
    """Of two tenants that drafted trees and a chain and learned; with what was drafted."""
    random = np.random.default_rng(0)
    host = arena_of([(strategy, [with_history(strategy, random, 12, 16)]) for strategy in (host_trie(), host_trie())])
    trie, layout = DeviceTrie(host.layout.sizes, device), host.layout
    trie.arena.copy_(host.arena)
    rows = torch.tensor([1, 0], dtype=torch.int32, device=device)
    budgets, counts, lengths = torch.tensor([[16, 64], [2, 1], [4, 0]], dtype=torch.int32, device=device)
    out = DeviceDrafts(*(part.to(device) for part in space(2)))
    chain = DeviceDrafts(*(part.to(device) for part in space(2)))
    trie.propose(rows, budgets, out)
    trie.learn(rows, out.tokens[:, :2].clone(), counts)
    trie.propose_chains(rows, lengths, chain.tokens, chain.scores, chain.counts)
    return {
        "indexes": trie.arena[: layout.weights].cpu(),
        "weights": trie.arena[layout.weights : layout.states].cpu(),
        "rows": trie.arena[layout.states : layout.roots].cpu(),
        **{f"{name} of trees": part.cpu() for name, part in out._asdict().items()},
        **{f"{name} of chains": part.cpu() for name, part in chain._asdict().items()},
    }


def mixed_arena(device: torch.device) -> dict[str, torch.Tensor]:
    """Of two tenants that mixed and learned; with what was drafted."""
    random, hosts = np.random.default_rng(0), [Mixture(SuccessorTable(CONTEXTS)) for _ in range(2)]
    tenants = [(host, [test_mixing.with_history(host, random, 12, 16, steps=6)]) for host in hosts]
    host, _ = test_mixing.arena_of(tenants, [test_mixing.source_tree(random, 12, 16) for _ in range(2)])
    trie = DeviceTrie(host.layout.sizes, device)
    trie.arena.copy_(host.arena)
    mixture = DeviceMixture(trie)
    rows, budgets, counts = torch.tensor([[1, 0], [7, 2], [1, 9]], dtype=torch.int32, device=device)
    nodes = torch.from_numpy(random.integers(0, 12, (3, 24), dtype=np.int32)).to(device)
    parents = torch.arange(-1, 23, dtype=torch.int32, device=device)
    offsets = torch.tensor([0, 6, 23], dtype=torch.int32, device=device)
    top = torch.from_numpy(random.permuted(np.tile(np.arange(12, dtype=np.int32), (24, 1)), axis=1)[:, :9].copy())
    trees = VerifiedTrees(nodes[0], parents, top.to(device), offsets)
    out, layout = DeviceDrafts(*(part.to(device) for part in space(2))), trie.layout
    mixture.propose(rows, budgets, out)
    mixture.learn(rows, nodes[1:, :9].contiguous(), counts, rows, trees)
    return {
        "weights": trie.arena[layout.weights : layout.states].cpu(),
        "rows": trie.arena[layout.mixed : layout.scratch].cpu(),
        **{f"{name} of trees": part.cpu() for name, part in out._asdict().items()},
    }


@pytest.mark.timeout(400)
def test_numpy_and_triton_mix_and_learn_the_same() -> None:
    with setting(LAUNCHER, Launch.run_by_triton):
        by_triton = mixed_arena(DEVICE)
    for name, wanted in mixed_arena(torch.device("cpu")).items():
        if DEVICE.type == "cpu" or not name.startswith(("weights", "scores")):
            assert torch.equal(by_triton[name], wanted), name
        elif name != "weights":
            torch.testing.assert_close(by_triton[name], wanted, atol=1e-4, rtol=0)


@pytest.mark.timeout(400)
def test_numpy_and_triton_draft_and_learn_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, whose exponentials are other ones, nearly."""
    fixed_sizes(monkeypatch)
    with setting(LAUNCHER, Launch.run_by_triton):
        by_triton = drafted_arena(DEVICE)
    for name, wanted in drafted_arena(torch.device("cpu")).items():
        if DEVICE.type == "cpu" or name not in ("weights", "scores of trees", "scores of chains"):
            assert torch.equal(by_triton[name], wanted), name
        elif name == "weights":
            counted = wanted.abs() < 1 << 25  # others are the bits of a float32
            assert int((by_triton[name] - wanted)[counted].abs().max()) <= 64
        else:
            torch.testing.assert_close(by_triton[name], wanted, atol=1e-4, rtol=0)


def chosen(device: torch.device) -> list[torch.Tensor]:
    """What rows of two slots were given in random steps, and what was learned."""
    random, rows, longest = np.random.default_rng(1), 6, 5
    choice = DeviceChoice(rows, 2, longest, device, probabilistic=True)
    found, texts, lengths = [], np.zeros((rows, 256), np.int32), np.zeros(rows, np.int32)
    slots, learns = np.array([0, 0, 1, 1, 1, -1], np.int32), np.array([1, 1, 1, 0, 1, 1], np.int32)
    temperatures, index = np.array([0, 1, 0, 1, 1, 0], np.float32), random.permutation(rows).astype(np.int32)

    def on(array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array.copy()).to(device)

    for _ in range(30):
        for row, count in enumerate(random.integers(0, 5, rows)):
            texts[row, lengths[row] : lengths[row] + count] = random.integers(0, 2, count)
            lengths[row] += count
        choice.grade(on(index), on(learns), on(texts), on(lengths))
        drafts = random.integers(0, 2, (2, rows, longest))
        scores = np.sort(random.random((rows, longest)).astype(np.float32))[:, ::-1]
        counts = random.integers(0, longest + 1, rows).astype(np.int32)
        given = on(drafts[0]), on(drafts[1]), on(scores), on(counts), 4
        out, taken = choice.choose(on(index), on(slots), on(lengths), on(temperatures), *given)
        found += [out.cpu().clone(), taken.cpu().clone()]
    return [*found, choice.table.cpu()]


def test_numpy_and_triton_choose_the_same() -> None:
    with setting(LAUNCHER, Launch.run_by_triton):
        interpreted = chosen(DEVICE)
    plain = chosen(torch.device("cpu"))
    assert all(torch.equal(one, other) for one, other in zip(interpreted, plain, strict=True))
    assert plain[-1].sum() > 0
    assert 0 < sum(int((taken > 0).sum()) for taken in plain[1:-1:2]) < 30 * 6
