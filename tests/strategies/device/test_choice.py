"""Which of two drafts a row gets, and what is learned from the text that comes to be written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from draftwood_strategies.device import choice as numbers
from draftwood_strategies.device.choice import CELLS, DeviceChoice

K, LENGTH = 4, 8192
CPU = torch.device("cpu")


class Rows:
    """Rows that write the text that is said here."""

    def __init__(self, rows: int, slots: Sequence[int], probabilistic: bool = False) -> None:
        self.choice = DeviceChoice(rows, max([*slots, 0]) + 1, K, CPU, probabilistic)
        self.index = torch.arange(rows, dtype=torch.int32)
        self.texts = torch.zeros((rows, LENGTH), dtype=torch.int32)
        self.lengths = torch.zeros(rows, dtype=torch.int32)
        self.slots = torch.tensor([*slots], dtype=torch.int32)
        self.learns = torch.ones(rows, dtype=torch.int32)
        self.temperatures = torch.zeros(rows)

    def choose(
        self, theirs: Sequence[Sequence[int]], ours: Sequence[Sequence[int]], scores: Sequence[Sequence[float]]
    ) -> list[int]:
        """How many tokens of ours each row takes, after a check of what the drafts are."""
        counts = torch.tensor([len(tokens) for tokens in ours], dtype=torch.int32)
        table, promised = torch.zeros((len(ours), K), dtype=torch.int64), torch.zeros((len(ours), K))
        for row, (tokens, of_tokens) in enumerate(zip(ours, scores, strict=True)):
            table[row, : len(tokens)] = torch.tensor(tokens)
            promised[row, : len(tokens)] = torch.tensor(of_tokens)
        given = torch.tensor(theirs)
        out, taken = self.choice.choose(
            self.index, self.slots, self.lengths, self.temperatures, given, table, promised, counts, K
        )
        for row, count in enumerate(taken.tolist()):
            assert out[row].tolist() == [*ours[row][:count], *theirs[row][count:]]
        result: list[int] = taken.tolist()
        return result

    def write(self, *texts: Sequence[int]) -> None:
        """Each row writes so many tokens."""
        for row, tokens in enumerate(texts):
            begin = int(self.lengths[row])
            self.texts[row, begin : begin + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
            self.lengths[row] += len(tokens)
        self.choice.grade(self.index, self.learns, self.texts, self.lengths)

    def counts(self, slot: int = 0) -> list[int]:
        """Counts and sums of theirs and ours in all cells of a slot."""
        found: list[int] = self.choice.table[slot].sum(0).tolist()
        return found


@pytest.mark.parametrize(
    ("ours", "scores", "taken"),
    [
        ([5, 6, 7, 8], [0.9, 0.9, 0.9, 0.9], 4),
        ([5, 6], [0.5, 0.2], 0),
        ([], [], 0),
        ([1, 2], [0.9, 0.9], 0),  # they agree, and theirs goes on
        ([1, 5, 6, 7], [0.3, 0.3, 0.3, 0.3], 4),  # if 1 is accepted, the rest is certain
        ([1, 5, 6, 7], [0.3, 0.1, 0.1, 0.1], 0),
    ],
)
def test_the_longer_promise_behind_tokens_alike_is_taken_before_anything_is_known(
    ours: list[int], scores: list[float], taken: int
) -> None:
    assert Rows(1, [0]).choose([[1, 2, 3, 4]], [ours], [scores]) == [taken]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ([1, 2, 3, 9], [1, 3, 1, 0]),
        ([5, 6, 9, 9], [1, 0, 1, 2]),
        ([5, 6, 7, 8], [1, 0, 1, 4]),
        ([9, 9, 9, 9], [1, 0, 1, 0]),
    ],
)
def test_both_drafts_are_compared_with_what_is_written(written: list[int], expected: list[int]) -> None:
    """In however many steps that is, and whichever of them was verified."""
    for scores in ([0.9] * 4, [0.1] * 4):
        rows = Rows(1, [0])
        rows.choose([[1, 2, 3, 4]], [[5, 6, 7, 8]], [scores])
        rows.write(written[:1])
        assert rows.counts() == [0, 0, 0, 0]
        rows.choose([[50, 50, 50, 50]], [[60, 60, 60, 60]], [scores])  # not kept: a pair is
        rows.write(written[1:])
        assert rows.counts() == expected
        rows.write([1])
        assert rows.counts() == expected


def test_tokens_alike_count_for_neither() -> None:
    rows = Rows(1, [0])
    rows.choose([[1, 2, 3, 4]], [[1, 2, 7]], [[0.9, 0.9, 0.9]])
    rows.write([1, 2, 7, 4])
    assert rows.counts() == [1, 0, 1, 1]


def test_rows_without_a_slot_or_that_do_not_learn_and_rows_of_other_requests_teach_nothing() -> None:
    rows = Rows(3, [0, 0, -1])
    rows.learns[0] = 0
    assert rows.choose([[1, 2, 3, 4]] * 3, [[5, 6, 7, 8]] * 3, [[0.9] * 4] * 3) == [4, 4, 0]
    rows.choice.begin(1)
    rows.write(*[[1, 2, 3, 4]] * 3)
    assert rows.counts() == [0, 0, 0, 0]


def played(rows: Rows, steps: int, text: list[int]) -> list[int]:
    """How many rows of a step take ours, in each, where both drafts are certain, and this text comes."""
    taken, count = [], len(rows.index)
    for _ in range(steps):
        lengths = rows.choose([[1, 2, 3, 4]] * count, [[5, 6, 7, 8]] * count, [[0.9] * 4] * count)
        taken.append(sum(length > 0 for length in lengths))
        rows.write(*[text] * count)
    return taken


def test_a_slot_learns_whose_promises_hold_and_no_other_slot_does() -> None:
    """Scores promise much, and nothing is accepted: after some steps they are not believed any more."""
    rows = Rows(2, [0, 0])
    taken = played(rows, 20, [1, 2, 3, 4])
    assert taken[0] == 2
    assert taken[-1] == 0
    assert taken == sorted(taken, reverse=True)
    rows.slots[:] = torch.tensor([0, 1])
    rows.choice.table = torch.cat([rows.choice.table, torch.zeros_like(rows.choice.table)])
    draft = [[1, 2, 3, 4]] * 2, [[5, 6, 7, 8]] * 2, [[0.9] * 4] * 2
    assert rows.choose(*draft) == [0, 4]
    rows.choice.forget(0)
    assert rows.choose(*draft) == [4, 4]


def test_what_is_learned_is_followed_when_it_changes() -> None:
    rows = Rows(4, [0] * 4)
    assert played(rows, 200, [1, 2, 3, 4])[-1] == 0
    after = played(rows, 300, [5, 6, 7, 8])
    assert after[0] == 0
    assert after[-1] == 4
    assert max(rows.choice.table[..., 0].max(), rows.choice.table[..., 2].max()) < 2 * numbers._MOST


def test_at_least_as_many_are_accepted_as_of_the_better_one_in_each_kind_of_place() -> None:
    """Random drafts whose acceptance depends on the score otherwise than it promises."""
    random = np.random.default_rng(0)
    rows, accepted = Rows(1, [0]), np.zeros(3)
    kinds = {0.9: (0.2, 0.8), 0.4: (0.9, 0.5), 0.2: (0.1, 0.5)}  # by score, the chances of ours and of theirs
    for step in range(1500):
        score = [*kinds][random.integers(len(kinds))]
        lengths = [int(np.cumprod(random.random(K) < chance).sum()) for chance in kinds[score]]
        text = [*range(10, 10 + K)]
        drafts = [[*text[:length], *[99 + source] * (K - length)] for source, length in enumerate(lengths)]
        [taken] = rows.choose([drafts[1]], [drafts[0]], [[score**n for n in range(1, K + 1)]])
        if step >= 300:
            accepted += [*lengths, lengths[0 if taken else 1]]
        rows.write(text)
    ours, theirs, chosen = accepted
    assert chosen > 1.1 * max(ours, theirs)


@pytest.mark.parametrize("theirs", [[1, 2, 3, 4], [5, 6, 7, 8]])
def test_drawn_tokens_have_no_part_in_the_choice(theirs: list[int]) -> None:
    """They are verified by the probabilities that they were drawn by, which holds only for tokens that may be any."""
    rows = Rows(2, [0, 0], probabilistic=True)
    rows.temperatures[0] = 0.7
    alike = theirs == [5, 6, 7, 8]  # which only the greedy row may see
    assert rows.choose([theirs] * 2, [[5, 6, 7, 8]] * 2, [[0.9] * 4] * 2) == [4, 0 if alike else 4]


@pytest.mark.parametrize(("score", "expected"), [(0.9, [0, 0, 1, 4]), (0.1, [1, 0, 1, 4])])
def test_drawn_tokens_that_were_not_verified_do_not_count(score: float, expected: list[int]) -> None:
    """A text that was verified without them has fewer of them than it had accepted."""
    rows = Rows(1, [0], probabilistic=True)
    rows.temperatures[0] = 0.7
    rows.choose([[1, 2, 3, 4]], [[5, 6, 7, 8]], [[score] * 4])
    rows.write([5, 6, 7, 8])
    assert rows.counts() == expected


def test_greedy_and_sampled_rows_are_learned_apart() -> None:
    rows = Rows(2, [0, 0])
    rows.temperatures[1] = 1.0
    rows.choose([[1, 2, 3, 4]] * 2, [[5, 6, 7, 8]] * 2, [[0.9] * 4] * 2)
    rows.write([5, 6, 7, 8], [1, 2, 3, 4])
    table = rows.choice.table[0].view(2, CELLS // 2, 4).sum(1)
    assert table.tolist() == [[1, 0, 1, 4], [1, 4, 1, 0]]
