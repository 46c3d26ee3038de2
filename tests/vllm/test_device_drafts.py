"""Drafts for the rows of a step, on CPU tensors, with the drafts of `fake_trie`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from draftwood_strategies.device import arena, trie
from draftwood_vllm.device_drafts import (
    Decision,
    DeviceDrafts,
    DraftSizes,
    Joined,
    Load,
    Purge,
    RowStates,
    StepDrafts,
    warm_up,
)
from tests.vllm.fake_trie import SURVIVAL, DeviceSizes, DeviceTrie

LONGEST, LENGTH, ROWS, VOCABULARY = 4, 64, 6, 1000
DRAFTS = Decision("acme", True, LONGEST)


def fake_trie() -> Any:
    return DeviceTrie(DeviceSizes(ROWS, LENGTH, 4, 1000, LONGEST, LONGEST), "cpu")


class Host:
    """The state that a host keeps of its requests, and the drafts for them."""

    def __init__(self, trie: Any) -> None:
        self.states = RowStates(
            torch.zeros((ROWS, LENGTH), dtype=torch.int32),
            torch.zeros(ROWS, dtype=torch.int32),
            torch.zeros((ROWS, 1), dtype=torch.int64),
        )
        self.trie = trie
        self.drafts = DeviceDrafts(self.trie, self.states, DraftSizes(LONGEST, VOCABULARY, 16, LONGEST, 4))

    def join(self, name: str, state: int, prompt: Sequence[int], decision: Decision = DRAFTS, limit: int = 40) -> None:
        self.states.tokens[state, : len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
        self.states.lengths[state] = len(prompt)
        self.drafts.join(Joined(name, state, len(prompt), limit, decision))

    def step(self, written: dict[int, Sequence[int]], longest: int = LONGEST) -> StepDrafts:
        """A step in which states, in this order, write tokens."""
        for state, tokens in written.items():
            begin = int(self.states.lengths[state])
            self.states.tokens[state, begin : begin + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
            self.states.lengths[state] += len(tokens)
            if tokens:
                self.states.last[state] = tokens[-1]
        counts = torch.tensor([len(tokens) for tokens in written.values()], dtype=torch.int32)
        return self.drafts.propose(torch.tensor([*written], dtype=torch.int64), counts, longest)


@pytest.fixture
def host() -> Host:
    return Host(fake_trie())


@pytest.mark.parametrize(
    ("prompt", "token", "nodes", "longest", "draft"),
    [
        pytest.param([5, 6, 7, 8, 9], 6, LONGEST, LONGEST, [7, 8, 9, 6], id="of its own text"),
        pytest.param([5, 6, 7], 5, 2, LONGEST, [6, 7], id="shorter"),
        pytest.param([5, 6, 7, 8, 9], 6, LONGEST, 2, [7, 8], id="the host verifies fewer places"),
        pytest.param([5, 6, 7, 8, 9], 6, LONGEST, 0, [], id="the host verifies none"),
        # As placeholders of images are; the model has no embedding of them.
        pytest.param([5, 6, VOCABULARY, 8], 5, LONGEST, LONGEST, [6, None, 8, 5], id="beyond the vocabulary"),
    ],
)
def test_a_draft_has_the_last_token_in_places_without_one_of_its_own(
    host: Host, prompt: list[int], token: int, nodes: int, longest: int, draft: list[int | None]
) -> None:
    """vLLM verifies each place, and fewer for large batches (`num_speculative_tokens_per_batch_size`)."""
    host.join("a", 3, prompt, Decision("", False, nodes))
    step = host.step({3: [token]}, longest)
    places = [*draft, *[None] * (LONGEST - len(draft))]
    assert step.tokens.dtype == torch.int64
    assert step.tokens.tolist() == [[token if place is None else place for place in places]]
    assert step.confidences[0].tolist() == pytest.approx([0 if place is None else SURVIVAL for place in places])
    assert step.written.tolist() == [[token, *[0] * LONGEST, 1, len(draft)]]


def test_several_tokens_of_a_step_are_learned_in_order(host: Host) -> None:
    host.join("a", 1, [1])
    host.step({1: [2, 3, 4]})
    step = host.step({1: [5, 2]})
    assert step.tokens.tolist() == [[3, 4, 5, 2]]
    assert host.trie.tenants == {"acme": [[2, 3, 4, 5, 2]]}


def test_rows_that_must_not_draft_nor_learn_do_neither(host: Host) -> None:
    host.join("quiet", 0, [1, 2, 3], Decision())
    host.join("mute", 1, [1, 2, 3], Decision("acme", False, LONGEST))
    step = host.step({0: [1], 1: [1]})
    assert step.tokens.tolist() == [[1, 1, 1, 1], [2, 3, 1, 1]]
    assert step.written[:, -2:].tolist() == [[1, 0], [1, 3]]  # what the first one wrote counts, too
    assert host.trie.tenants == {}


def test_prompts_that_are_read_in_chunks_wait_for_their_first_token(host: Host) -> None:
    host.join("a", 0, [1, 2, 3, 1])
    step = host.step({0: []})
    assert step.tokens.tolist() == [[0] * LONGEST]
    assert step.written[0, -2:].tolist() == [0, 0]
    assert host.step({0: [2]}).tokens.tolist() == [[3, 1, 2, 2]]


def test_only_the_end_of_a_long_prompt_is_kept(host: Host) -> None:
    host.join("a", 0, range(100, 140), limit=60)
    host.step({0: [1]})
    assert host.trie.rows[0].text == [*range(124, 140), 1]


def test_nothing_is_drafted_beyond_what_a_request_may_write(host: Host) -> None:
    host.join("a", 0, [1, 2, 3, 4, 5], limit=8)
    step = host.step({0: [1]})
    assert step.written[0, -1] == 1  # the sixth of eight tokens is written; the last one is the model's own
    step = host.step({0: [2, 3, 4, 5]})  # scheduled before its end was known
    assert step.written[0, -2:].tolist() == [2, 0]
    assert host.trie.tenants["acme"] == [[1, 2, 3]]


def test_a_row_is_free_after_its_request(host: Host) -> None:
    host.join("a", 0, [1, 2])
    host.join("gone before it began", 1, [1])
    host.drafts.leave("gone before it began")
    host.drafts.leave("nobody")
    host.step({0: [3]})
    host.drafts.leave("a")
    assert (len(host.drafts), host.trie.rows) == (0, {})
    host.join("b", 0, [7, 8])
    assert host.step({0: [7]}).tokens.tolist() == [[8, 7, 7, 7]]


def test_what_comes_from_outside_is_drafted_and_purged(host: Host) -> None:
    host.join("a", 0, [1])
    host.join("later", 1, [1])
    host.drafts.apply(Load("acme", [np.array([2, 30, 31], np.int32)]))
    assert host.step({0: [2]}).tokens.tolist() == [[30, 31, 2, 2]]
    host.drafts.apply(Purge("acme", ["a", "gone"]))
    step = host.step({0: [2], 1: [2]})
    assert step.tokens.tolist() == [[2, 2, 2, 2], [2, 2, 2, 2]]
    host.step({0: [50], 1: [60]})
    assert host.trie.tenants == {"acme": [[2, 60]]}  # what "a" writes is not learned any more


def real_trie() -> trie.DeviceTrie:
    """Its kernels run by NumPy."""
    return trie.DeviceTrie(arena.DeviceSizes(ROWS, LENGTH, 4, 1000, 4 * LONGEST, LONGEST), torch.device("cpu"))


@pytest.mark.parametrize(("make", "steps", "least"), [(fake_trie, 200, 300), (real_trie, 20, 0)])
def test_ranks_with_the_same_inputs_have_the_same_drafts(make: Callable[[], Any], steps: int, least: int) -> None:
    """Two ranks of tensor parallelism: the same requests, tokens and decisions at random."""
    ranks = [Host(make()) for _ in range(2)]
    rng, live = np.random.default_rng(7), dict[int, str]()
    drafted = 0
    for number in range(steps):
        for state in range(ROWS):
            if state in live and rng.random() < 0.05:
                for rank in ranks:
                    rank.drafts.leave(live[state])
                del live[state]
            elif state not in live and rng.random() < 0.3:
                live[state] = f"{number}/{state}"
                prompt = rng.integers(0, 9, rng.integers(1, 12)).tolist()
                decision = Decision(str(rng.choice(["", "a", "b"])), bool(rng.random() < 0.7), int(rng.integers(0, 5)))
                for rank in ranks:
                    rank.join(live[state], state, prompt, decision, 60)
        change: Any = Load("a", [rng.integers(0, 9, 5).astype(np.int32)])
        change = Purge("b", [*live.values()][:1]) if number % 50 == 15 else change
        states = [state for state in live if int(ranks[0].states.lengths[state]) < LENGTH - 6]
        wrote = {state: rng.integers(0, 9, rng.integers(0, 4)).tolist() for state in states}
        for rank in ranks:
            rank.drafts.apply(change)
        both = [rank.step(wrote) for rank in ranks]
        for one, other in zip(*both, strict=True):
            assert torch.equal(one, other)
        drafted += int(both[0].written[:, -1].sum())
    assert drafted > least
    if make is real_trie:
        assert torch.equal(ranks[0].trie.arena, ranks[1].trie.arena)


def test_the_warm_up_leaves_no_row() -> None:
    trie = fake_trie()
    warm_up(trie, LONGEST, LONGEST, torch.device("cpu"))
    assert (trie.rows, trie.tenants) == ({}, {})
    assert {"append_prompts", "learn", "propose_chains"} <= {*trie.calls}


def test_the_real_trie_drafts_what_was_written() -> None:
    host = Host(real_trie())
    warm_up(host.trie, LONGEST, LONGEST, torch.device("cpu"))
    host.join("a", 3, [5, 6, 7, 8, 9] * 3)
    host.drafts.apply(Load("acme", [np.array([20, 21, 22, 23, 24], np.int32)] * 3))
    assert host.step({3: [5]}).tokens.tolist() == [[6, 7, 8, 9]]
    assert host.step({3: [20]}).tokens.tolist() == [[21, 22, 23, 24]]
    host.drafts.apply(Purge("acme", ["a"]))
    assert host.trie.tokens("acme") == 0
