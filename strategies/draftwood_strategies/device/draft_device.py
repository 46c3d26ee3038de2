"""The arena of a process, for strategies that draft on its device: what they ask for becomes calls of kernels there."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from draftwood_strategies.arrays import Float32Array, Int32Array, segment_sizes
from draftwood_strategies.base import StepFeedback, WrittenOnDevice
from draftwood_strategies.built_in import HybridOptions, RecyclingOptions, TrieOptions
from draftwood_strategies.device.arena import DeviceSizes
from draftwood_strategies.device.calls import VerifiedTrees
from draftwood_strategies.device.mixture import DeviceMixture
from draftwood_strategies.device.trie import DeviceDrafts, DeviceTrie
from draftwood_strategies.draft import DraftTrees
from draftwood_strategies.options import read_options
from draftwood_strategies.registry import default_sources
from draftwood_strategies.successors import WIDTH

_ALIGNED = 4
"""Numbers that each uploaded array begins at a multiple of. Kernels are compiled once for addresses that 16 divides."""
_WIDTH = 16
"""Tokens of a row that are learned at once are padded to a multiple of this, for the same reason."""
_ALL = np.True_
_NO_ROW = -1
_MIXED = {"trie", "recycling"}
"""The sources of a hybrid on a device."""


class LeavesDevice(Protocol):
    """A tenant of the arena."""

    def leave_device(self) -> None:
        """Takes what its region has to the host."""


class DeviceParts(NamedTuple):
    """What a strategy drafts from: a trie, a successor table, or both, mixed.

    Attributes:
        trie, table: their options; None for none.
    """

    trie: TrieOptions | None
    table: RecyclingOptions | None

    @classmethod
    def of(cls, name: str, options: Mapping[str, Any]) -> DeviceParts | None:
        """Those of a built-in strategy; None if it has others.

        Raises:
            TypeError: it has no such option.
            ValueError: an option's value is not allowed.
        """
        if name == "trie":
            return cls(TrieOptions(**options), None)
        if name == "recycling":
            return cls(None, RecyclingOptions(**options))
        sources = options.get("sources", default_sources())
        if name != "hybrid" or {*HybridOptions(sources=sources).names()} != _MIXED:
            return None
        of_parts = [read_options(kind).keys() for kind in (TrieOptions, RecyclingOptions)]
        if unknown := options.keys() - {"sources"}.union(*of_parts):
            raise TypeError(f"none of the sources {', '.join(sorted(_MIXED))} has an option {min(unknown)!r}")
        trie, table = ({name: options[name] for name in options.keys() & names} for names in of_parts)
        return cls(TrieOptions(**trie), RecyclingOptions(**table))


class _Asked(NamedTuple):
    """Rows of a step.

    Attributes:
        tries, tables: int32[b] on the device, those that have a trie and a successor table, negative in the place of
            others; None if none has.
    """

    tries: torch.Tensor | None
    tables: torch.Tensor | None


class DraftDevice:
    """The arena of a process, and its rows. What it computes waits for nothing that the model computes.

    Args:
        sizes, device, options: as of `DeviceTrie`.

    Attributes:
        trie: the arena.
        mixture: of successor tables in it; None if there is no space for contexts.

    Raises:
        ArenaTooLargeError, DeviceUnsupportedError: as of `DeviceTrie`.
    """

    def __init__(self, sizes: DeviceSizes, device: torch.device, options: TrieOptions | None = None) -> None:
        self.trie = DeviceTrie(sizes, device, options)
        self.mixture = DeviceMixture(self.trie) if sizes.contexts else None
        self.sizes = sizes
        self._has_trie, self._has_table = np.zeros((2, sizes.rows), np.bool_)
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
        numbers = sizes.rows * (3 * sizes.nodes + 1)
        self._drafted, self._following = torch.empty((2, numbers), dtype=torch.int32, device=device)
        self._copied = torch.empty(numbers, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._tenants = map(str, itertools.count())
        self._strategies: weakref.WeakValueDictionary[str, LeavesDevice] = weakref.WeakValueDictionary()
        self.trie.leaving = partial(_take_to_host, self._strategies)
        self._dropped: deque[str] = deque()

    def queue(self) -> AbstractContextManager[object]:
        """In it, calls of `trie` are queued behind one another, and not behind what the model computes."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def takes(self, parts: DeviceParts) -> bool:
        """Whether a strategy of these parts can be in the arena."""
        trie, table, own = parts.trie, parts.table, self.trie.options
        if table is not None and not 0 < self.sizes.contexts <= table.capacity_contexts:
            return False
        if trie is None:
            return True
        same = all(getattr(trie, name) == getattr(own, name) for name in ("branch_length", "learn", "prompt_weight"))
        return same and trie.capacity_tokens >= self.sizes.tenant_tokens

    def register(self, strategy: LeavesDevice) -> str:
        """A new tenant, which is forgotten when the strategy is dropped."""
        tenant = next(self._tenants)
        self._strategies[tenant] = strategy
        weakref.finalize(strategy, self._dropped.append, tenant)
        return tenant

    def forget_dropped(self) -> None:
        """Frees the regions and rows of tenants that are no more."""
        while self._dropped:
            self.trie.forget(self._dropped.popleft())

    def begin(self, tenant: str, parts: DeviceParts, prompt: Int32Array, learns: bool, backs_off: bool) -> int | None:
        """A row for a new sequence, None if all are taken."""
        row = self.trie.free_row()
        if row is not None:
            self.trie.begin(row, tenant, learns, backs_off)
            self._has_trie[row], self._has_table[row] = parts.trie is not None, parts.table is not None
            if self.mixture is not None and parts.table is not None:
                self.mixture.begin(row, prompt)
        return row

    def append(self, row: int, tokens: Int32Array, *, memory: bool, counted: bool = False) -> None:
        """Goes on with what the memory has of a row, or with its own text, by `tokens`, int32[n].

        Args:
            memory: the memory; otherwise the text.
            counted: of the text, see `DeviceTrie.append_to_texts`.
        """
        if tokens.shape[0] == 0:
            return
        rows, offsets, given = self._uploaded(_int32([row]), _int32([0, tokens.shape[0]]), tokens)
        if memory:
            self.trie.append_to_memories(rows, given, offsets)
        else:
            self.trie.append_to_texts(rows, given, offsets, counted=counted)

    def begin_output(self, row: int) -> None:
        """The prompt of a row is complete."""
        self.trie.begin_outputs(*self._uploaded(_int32([row])))

    def learn(
        self,
        rows: SequenceOf[int],
        runs: SequenceOf[Int32Array],
        in_texts: SequenceOf[bool],
        feedback: StepFeedback | None,
    ) -> None:
        """Each row has accepted its run, int32[n].

        Args:
            in_texts: whether its text, whose prompt is complete, goes on with it.
            feedback: of the same rows; None if the predictions are not known.
        """
        if not rows:
            return
        counts = _int32([run.shape[0] for run in runs])
        tokens = np.zeros((len(rows), -(-int(counts.max()) // _WIDTH) * _WIDTH), np.int32)
        for of_row, run in zip(tokens, runs, strict=True):
            of_row[: run.shape[0]] = run
        numbers = np.arange(len(rows), dtype=np.int32)
        arrays = tokens, counts, numbers, *_verified(feedback, len(rows))
        asked, (of_rows, lengths, sources, *tree) = self._asked(_int32(rows), np.array(in_texts, np.bool_), *arrays)
        self._learn(asked, of_rows, lengths, sources, VerifiedTrees(*tree))

    def propose(self, rows: SequenceOf[int], budgets: Int32Array) -> DraftTrees:
        """A draft for each row, whose prompt is complete; of more than `sizes.nodes` nodes for none. Waits for the
        device.

        Args:
            budgets: int32[rows].
        """
        b, n = len(rows), self.sizes.nodes
        if b == 0:
            return DraftTrees.empty(0)
        numbers = self._drafted[: b * (3 * n + 1)]
        asked, [most] = self._asked(_int32(rows), _ALL, np.minimum(budgets, n))
        self._propose(asked, most, _drafts_in(numbers, b, n))
        copied = self._copied[: numbers.shape[0]].copy_(numbers, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        return _trees(copied.numpy(), b, n)

    def follow(
        self, rows: Int32Array, sources: Int32Array, budgets: Int32Array, written: WrittenOnDevice
    ) -> DeviceDrafts:
        """See `FollowedDevice`; queued behind what the model computes."""
        b, n = rows.shape[0], self.sizes.nodes
        computing = None if self._stream is None else torch.cuda.current_stream(written.tokens.device)
        if self._stream is not None and computing is not None:
            computing.wait_stream(self._stream)
        asked, [of_step, most] = self._asked(rows, _ALL, sources, np.minimum(budgets, n))
        tokens, counts = written.tokens.index_select(0, of_step), written.counts.index_select(0, of_step) + 1
        trees = VerifiedTrees(written.nodes, written.parents, written.top_tokens, written.offsets)
        self._learn(asked, tokens, counts, of_step, trees)
        out = _drafts_in(self._following[: b * (3 * n + 1)], b, n)
        self._propose(asked, most, out)
        if self._stream is not None and computing is not None:
            self._stream.wait_stream(computing)
        return out

    def _learn(
        self, asked: _Asked, tokens: torch.Tensor, counts: torch.Tensor, sources: torch.Tensor, trees: VerifiedTrees
    ) -> None:
        """What a step wrote and verified, see `DeviceMixture.learn`."""
        if self.mixture is not None and asked.tables is not None:
            self.mixture.learn(asked.tables, tokens, counts, sources, trees)
        if asked.tries is not None:
            self.trie.learn(asked.tries, tokens, counts)

    def _propose(self, asked: _Asked, budgets: torch.Tensor, out: DeviceDrafts) -> None:
        if asked.tries is not None:
            self.trie.propose(asked.tries, budgets, out)
        if self.mixture is not None and asked.tables is not None:
            self.mixture.propose(asked.tables, budgets, out)

    def _asked(
        self, rows: Int32Array, with_trie: npt.NDArray[np.bool_] | np.bool_, *arrays: Int32Array
    ) -> tuple[_Asked, list[torch.Tensor]]:
        """Rows by their parts, without the trie of those that are not `with_trie`, and arrays on the device."""
        tries, tables = self._has_trie[rows] & with_trie, self._has_table[rows]
        each = [np.where(having, rows, _NO_ROW) for having in (tries, tables)]
        of_tries, of_tables, *on_device = self._uploaded(*each, *arrays)
        return _Asked(of_tries if tries.any() else None, of_tables if tables.any() else None), on_device

    def _uploaded(self, *arrays: Int32Array) -> list[torch.Tensor]:
        """Copies on the device, by one upload that the host does not wait for."""
        begins = [0, *itertools.accumulate(-(-array.size // _ALIGNED) * _ALIGNED for array in arrays)]
        numbers = np.zeros(begins[-1], np.int32)
        for begin, array in zip(begins, arrays, strict=False):
            numbers[begin : begin + array.size] = array.reshape(-1)
        on_device = self.trie.uploaded(numbers)
        return [
            on_device[begin : begin + array.size].view(array.shape)
            for begin, array in zip(begins, arrays, strict=False)
        ]


def _take_to_host(strategies: Mapping[str, LeavesDevice], tenant: str) -> None:
    strategy = strategies.get(tenant)
    if strategy is not None:
        strategy.leave_device()


def _drafts_in(numbers: torch.Tensor, rows: int, nodes: int) -> DeviceDrafts:
    """Views of int32[rows * (3 * nodes + 1)]."""
    tokens, parents, scores = numbers[: 3 * rows * nodes].view(3, rows, nodes)
    return DeviceDrafts(tokens, parents, scores.view(torch.float32), numbers[3 * rows * nodes :])


def _trees(numbers: Int32Array, rows: int, nodes: int) -> DraftTrees:
    """What `DeviceDrafts` has for so many rows, as int32[rows * (3 * nodes + 1)], without unused nodes."""
    tokens, parents, scores = numbers[: 3 * rows * nodes].reshape(3, rows, nodes)
    counts = numbers[3 * rows * nodes :]
    used = np.arange(nodes) < counts[:, None]
    offsets = np.zeros(rows + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    drafted: Float32Array = scores.view(np.float32)[used]
    return DraftTrees(tokens[used], parents[used], drafted, offsets)


def _verified(feedback: StepFeedback | None, trees: int) -> list[Int32Array]:
    """As `VerifiedTrees`; trees without nodes if the predictions are not known."""
    if feedback is None or feedback.top_tokens is None:
        return [*np.zeros((2, 1), np.int32), np.zeros((1, WIDTH), np.int32), np.zeros(trees + 1, np.int32)]
    begins = np.repeat(feedback.offsets[:-1], segment_sizes(feedback.offsets))
    parents = np.where(feedback.parents >= 0, feedback.parents + begins, feedback.parents)
    return [feedback.tokens, parents, np.ascontiguousarray(feedback.top_tokens[:, :WIDTH]), feedback.offsets]


def _int32(numbers: SequenceOf[int]) -> Int32Array:
    return np.array(numbers, np.int32)
