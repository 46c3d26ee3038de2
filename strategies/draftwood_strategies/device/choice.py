"""A choice between a draft model's draft and one from a memory, on the device, learned from all verified text.

Each step has two drafts of a row: theirs, from a model, and ours, with the scores of its tokens. Where they differ, the
one is verified that had more tokens accepted before, in places like this one. What both would have had accepted is
known without trying: the text that comes to be written, whichever draft was verified, is compared with both. So no step
is spent on exploration (HedgeSpec, arXiv 2510.20064). All is whole numbers and sums, so ranks that write the same text
choose alike.
"""

from __future__ import annotations

import math

import torch

from draftwood_strategies.device.launching import launch

HEADER = 8
"""Numbers of a row before its two kept drafts: the text's length when they were made or -1 for none, the tokens of
theirs, the cell of the table, how many tokens the drafts begin with alike, and whether theirs counts."""
START, SIZE, CELL, AGREED, COUNTED = range(5)
BINS = 16
"""Of the tokens that ours promises beyond the tokens alike, as its scores say: that follows from how long a phrase
matched, how often, and where."""
BINS_PER_LOG = 4.0 / math.log(2.0)
CELLS = 2 * 2 * BINS
"""Of a slot: greedy and sampled rows, drafts that differ at once and later, `BINS`."""
PRIOR_COUNT, PRIOR_PROMISE, PRIOR_LENGTH = 4.0, 0.75, 2.0
"""A cell begins as if so many times ours had this part of what its scores promise accepted, and theirs so many tokens.
So theirs is preferred until ours has shown more, which costs nothing: it need not be verified for that. Not tuned."""
_MOST = 256
"""Of a cell's counts, which are then halved. Not tuned."""
_HALVING_STEPS = 64
"""A table is looked through in one of so many steps. Not tuned."""


class DeviceChoice:
    """Tables of accepted lengths by slots, such as one for each tenant, and what rows drafted.

    Args:
        states: rows of a host.
        slots: separate tables.
        longest: k, places for draft tokens.
        probabilistic: tokens of theirs in sampled rows are drawn, and verified by the probabilities that they were
            drawn by. The choice does not look at these tokens, which would change the distribution of what is written.
    """

    def __init__(self, states: int, slots: int, longest: int, device: torch.device, probabilistic: bool) -> None:
        self._longest, self._probabilistic = longest, probabilistic
        self._places = max(1 << (longest - 1).bit_length(), 2)
        # Of each cell: counts and sums of theirs, of ours.
        self.table = torch.zeros((slots, CELLS, 4), dtype=torch.int32, device=device)
        self._pending = torch.full((states, HEADER + 2 * self._places), -1, dtype=torch.int32, device=device)
        self._out = torch.zeros((states, longest), dtype=torch.int64, device=device)
        self._taken = torch.zeros(states, dtype=torch.int32, device=device)
        self._steps = 0

    def begin(self, state: int) -> None:
        """Another request takes a row."""
        self._pending[state, START].fill_(-1)

    def forget(self, slot: int) -> None:
        """What was learned in a slot is forgotten."""
        self.table[slot].zero_()

    def grade(self, index: torch.Tensor, learns: torch.Tensor, texts: torch.Tensor, lengths: torch.Tensor) -> None:
        """Learns from the rows that have written as many tokens as they kept drafts of.

        Args:
            index: int[b], the state of each row, each once.
            learns: int32[states], 0 for those that nothing is learned from.
            texts, lengths: int32[states, n] and int32[states], what each has read and written.
        """
        launch(
            *("choosing", "grade", (int(index.shape[0]),)),
            *(self.table, self._pending, index, learns, texts, lengths, int(texts.stride(0))),
            PLACES=self._places,
            num_warps=1,
        )
        self._steps += 1
        if self._steps % _HALVING_STEPS == 0:
            halves = self.table.view(-1, 2, 2)
            halves >>= (halves[..., :1] >= _MOST).int()

    def choose(
        self,
        index: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        temperatures: torch.Tensor,
        theirs: torch.Tensor,
        ours: torch.Tensor,
        scores: torch.Tensor,
        counts: torch.Tensor,
        size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """int64[b, k], each row's draft, and int32[b], how many of its tokens, the first ones, are ours. Behind these
        are tokens of theirs. The next call overwrites both.

        Args:
            index, lengths: as in `grade`.
            slots: int32[states], the slot of each; -1 for rows that always take theirs.
            temperatures: float32[states].
            theirs, ours: int64[b, k].
            scores: float32[b, k], the probability that a token of ours and all before it are accepted.
            counts: int32[b], how many tokens of ours there are.
            size: how many tokens of theirs there are.
        """
        count = int(index.shape[0])
        out, taken = self._out[:count], self._taken[:count]
        launch(
            *("choosing", "choose", (count,)),
            *(out, taken, self.table, self._pending, index, slots, lengths, temperatures),
            *(theirs, ours, scores, counts, size),
            K=self._longest,
            PLACES=self._places,
            PROBABILISTIC=self._probabilistic,
            num_warps=1,
        )
        return out, taken
