"""Drafts for the rows of a step from what is on the device: tensors in, tensors out, no wait for the device.

Knows requests by the index of their row in the host's state, and decisions about them (`Decision`), which are alike on
each rank of tensor parallelism. Learning on the device is deterministic, so ranks with the same tokens and decisions
have the same drafts, and exchange none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from draftwood_memory.records import Int32Array

if TYPE_CHECKING:
    from draftwood_strategies.device.trie import DeviceTrie


class Decision(NamedTuple):
    """How a request is drafted for.

    Attributes:
        region: of the device's memory, that it drafts from; "" for its own text alone.
        learns: what it writes is added to the region.
        nodes: the longest draft; 0 if it is neither drafted for nor learned.
    """

    region: str = ""
    learns: bool = False
    nodes: int = 0


class Load(NamedTuple):
    """Texts for a region, int32[n] each."""

    region: str
    runs: list[Int32Array]


class Purge(NamedTuple):
    """A region is emptied. What the requests in `muted` write is not added to it any more."""

    region: str
    muted: list[str]


@dataclass(frozen=True)
class RowStates:
    """What the host has of its requests on the device, and keeps up to date.

    Attributes:
        tokens: int32[states, length], prompt and output of each.
        lengths: int32[states], how many tokens those are, with what was just sampled.
        last: int64[states, 1], the token sampled last.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    last: torch.Tensor


class Joined(NamedTuple):
    """A request that takes a row.

    Attributes:
        state: its index in the host's states.
        known: tokens of its prompt, and of its output if it was preempted.
        limit: the most tokens that it may have.
    """

    request_id: str
    state: int
    known: int
    limit: int
    decision: Decision


class StepDrafts(NamedTuple):
    """The drafts of a step, on the device.

    Attributes:
        tokens: int64[b, k]; behind the end of a draft its row's last token, since each place is verified.
        used: bool[b, k], the places of drafts.
        scores: float32[b, k], of used places, the probability that a place and all before it are accepted. The next
            step overwrites them.
        written: int32[b, k + 3]: what each row wrote, how many tokens that are, and how many are drafted for it.
    """

    tokens: torch.Tensor
    used: torch.Tensor
    scores: torch.Tensor
    written: torch.Tensor

    @property
    def confidences(self) -> torch.Tensor:
        """float32[b, k], the probability that a place is accepted if the one before is; 0 behind the end."""
        before = torch.cat([torch.ones_like(self.scores[:, :1]), self.scores[:, :-1]], 1)
        return torch.where(self.used, (self.scores / before.clamp(min=1e-6)).clamp_(0.0, 1.0), 0.0)


class DraftSizes(NamedTuple):
    """Of a host's drafts.

    Attributes:
        longest: k, places for draft tokens in each row.
        vocab_size: draft tokens are below it.
        row_tokens: of a prompt, its last so many are kept.
        depth: of the trie's drafts, at most.
        tenants: with memories at once.
    """

    longest: int
    vocab_size: int
    row_tokens: int
    depth: int
    tenants: int


class DeviceDrafts:
    """Drafts for the requests of a host.

    Args:
        states: of the host; a request's row is its index there.
    """

    def __init__(self, trie: DeviceTrie, states: RowStates, sizes: DraftSizes) -> None:
        self._trie = trie
        self._states = states
        self._longest, self._vocab_size, self._row_tokens, self._depth, _ = sizes
        count, device = states.tokens.shape[0], states.tokens.device
        self._device = device
        self._live: dict[str, Joined] = {}
        self._unread: list[Joined] = []
        # By the host's index: row of the trie or -1, the longest draft, the most tokens.
        self._rows = np.full((3, count), -1, np.int32)
        self._rows_on_device: torch.Tensor | None = None
        self._places = torch.arange(sizes.longest + 1, device=device)
        self._out_tokens = torch.zeros((count, sizes.longest), dtype=torch.int32, device=device)
        self._out_scores = torch.zeros((count, sizes.longest), dtype=torch.float32, device=device)
        self._out_counts = torch.zeros(count, dtype=torch.int32, device=device)

    def __len__(self) -> int:
        return len(self._live)

    def join(self, joined: Joined) -> None:
        """A request takes the row of its state, from the next `propose` on."""
        self._live[joined.request_id] = joined
        drafted = joined.decision.nodes > 0
        self._rows[:, joined.state] = joined.state if drafted else -1, joined.decision.nodes, joined.limit
        self._rows_on_device = None
        if drafted:
            self._unread.append(joined)
            self._trie.begin(joined.state, joined.decision.region, joined.decision.learns)

    def leave(self, request_id: str) -> None:
        """A request ended, or was preempted. One that never joined may be named, too."""
        joined = self._live.pop(request_id, None)
        if joined is None:
            return
        self._unread = [one for one in self._unread if one.request_id != request_id]
        self._rows[:, joined.state] = -1
        self._rows_on_device = None
        if joined.decision.nodes > 0:
            self._trie.end(joined.state)

    def apply(self, change: Load | Purge) -> None:
        """What comes from outside, between two steps."""
        if isinstance(change, Load):
            self._trie.import_runs(change.region, change.runs)
            return
        self._trie.purge(change.region)
        for request_id in change.muted:
            if (joined := self._live.get(request_id)) is not None:
                self.leave(request_id)
                muted = joined.decision._replace(region="", learns=False)
                self.join(joined._replace(decision=muted, known=0))

    def propose(self, indexes: torch.Tensor, num_sampled: torch.Tensor, longest: int) -> StepDrafts:
        """Learns what each row wrote, and drafts for it.

        Args:
            indexes: int[b], the host's state of each row.
            num_sampled: int32[b], tokens that each wrote in the step; 0 while its prompt is not read to its end.
            longest: the longest draft that the host verifies next, k at most.
        """
        states, count = self._states, int(indexes.shape[0])
        index = indexes.long()
        self._read_prompts()
        rows, nodes, limits = self._of_rows()[:, index]
        lengths = states.lengths[index]
        began = lengths - num_sampled
        counts = torch.minimum(num_sampled, limits - began).clamp_(min=0)
        places = (began[:, None] + self._places).clamp_(min=0, max=states.tokens.shape[1] - 1)
        wrote = states.tokens[index[:, None], places.long()]
        self._trie.learn(rows, wrote, counts.int())

        drafting = torch.where(num_sampled > 0, rows, -1)
        room = torch.minimum(nodes, limits - lengths - 1).clamp_(min=0, max=min(longest, self._depth))
        room = torch.where(drafting >= 0, room, 0).int()
        tokens, scores = self._out_tokens[:count], self._out_scores[:count]
        drafted = self._out_counts[:count].zero_()
        self._trie.propose_chains(drafting, room, tokens, scores, drafted)
        drafted = torch.minimum(drafted, room)
        used = self._places[:-1] < drafted[:, None]
        used &= tokens < self._vocab_size
        return StepDrafts(
            torch.where(used, tokens.long(), states.last[index]),
            used,
            scores,
            torch.cat([wrote, counts[:, None].int(), drafted[:, None]], 1),
        )

    def _read_prompts(self) -> None:
        """Gives the trie what new rows have read."""
        joined, self._unread = self._unread, []
        if not joined:
            return
        kept = [min(one.known, self._row_tokens) for one in joined]
        pieces = [
            self._states.tokens[one.state, one.known - n : one.known] for one, n in zip(joined, kept, strict=True)
        ]
        rows = self._on_device(np.array([one.state for one in joined], np.int32))
        offsets = self._on_device(np.cumsum([0, *kept], dtype=np.int32))
        self._trie.append_prompts(rows, torch.cat(pieces), offsets)
        self._trie.begin_outputs(rows)

    def _of_rows(self) -> torch.Tensor:
        """int32[3, states]: `_rows`, copied when it has changed."""
        if self._rows_on_device is None:
            self._rows_on_device = self._on_device(self._rows)
        return self._rows_on_device

    def _on_device(self, values: np.ndarray[Any, np.dtype[np.int32]]) -> torch.Tensor:
        """A copy on the device. The host does not wait for it, so it is made of memory that nobody changes."""
        copied = torch.from_numpy(values.copy())
        if self._device.type != "cuda":
            return copied.to(self._device)
        return copied.pin_memory().to(self._device, non_blocking=True)


def warm_up(trie: DeviceTrie, longest: int, depth: int, device: torch.device) -> None:
    """Compiles what a step needs, in a row that no request has yet."""
    text = torch.arange(24, dtype=torch.int32, device=device) % 3
    trie.begin(0, "", False)
    trie.append_prompts(text[:1], text, torch.tensor([0, 24], dtype=torch.int32, device=device))
    trie.begin_outputs(text[:1])
    for count in (1, 2, 16):
        rows = torch.full((count,), -1, dtype=torch.int32, device=device)
        rows[0] = 0
        wrote = torch.zeros((count, longest + 1), dtype=torch.int32, device=device)
        lengths = torch.full((count,), min(longest, depth), dtype=torch.int32, device=device)
        trie.learn(rows, wrote, torch.ones_like(rows))
        scores = torch.zeros((count, longest), device=device)
        trie.propose_chains(rows, lengths, torch.zeros_like(scores, dtype=torch.int32), scores, torch.zeros_like(rows))
    trie.end(0)
