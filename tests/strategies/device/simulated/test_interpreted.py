"""Triton's own interpreter leaves the same bits as kernels run by NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draftwood_model_runner.runners.model_calls import setting
from draftwood_strategies.device.arena import DeviceSizes
from draftwood_strategies.device.launching import LAUNCHER, Launch
from tests.strategies.device.arenas import PlainArena
from tests.strategies.device.hosts import arena_of, fixed_sizes, host_trie, with_history
from tests.strategies.device.test_appending import random_steps
from tests.strategies.device.test_drafting import space


def written_arena() -> torch.Tensor:
    """Of texts and memories that have wrapped around, and recorded sequences."""
    arena = PlainArena(DeviceSizes(4, 64, 2, 256), regions=(0, 1, 0, 0))
    for runs in random_steps(0, rows=4, steps=8, longest=20):
        arena.write([0, 1, 2, 3], runs)
    arena.record(1, [1, 2, 3], [[1, 2, 3] * 10, [1, 2], [5] * 20])
    return arena.numbers


def test_numpy_and_triton_append_the_same() -> None:
    with setting(LAUNCHER, Launch.run_by_triton):
        interpreted = written_arena()
    assert torch.equal(interpreted, written_arena())


def drafted_arena() -> list[torch.Tensor]:
    """Of two tenants that drafted trees and a chain and learned; with what was drafted."""
    random = np.random.default_rng(0)
    trie = arena_of([(strategy, [with_history(strategy, random, 12, 16)]) for strategy in (host_trie(), host_trie())])
    rows, out, chain = torch.tensor([1, 0], dtype=torch.int32), space(2), space(2)
    trie.propose(rows, torch.tensor([16, 64], dtype=torch.int32), out)
    written = out.tokens[:, :2].clone()
    trie.learn(rows, written, torch.tensor([2, 1], dtype=torch.int32))
    lengths = torch.tensor([4, 0], dtype=torch.int32)
    trie.propose_chains(rows, lengths, chain.tokens, chain.scores, chain.counts)
    layout = trie.layout
    # Lanes of scratch space that are masked are left as they were.
    return [trie.arena[: layout.roots], trie.arena[layout.misses : layout.scratch], *out, *chain]


@pytest.mark.timeout(400)
def test_numpy_and_triton_draft_and_learn_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed_sizes(monkeypatch)
    with setting(LAUNCHER, Launch.run_by_triton):
        interpreted = drafted_arena()
    for found, wanted in zip(interpreted, drafted_arena(), strict=True):
        assert torch.equal(found, wanted)
