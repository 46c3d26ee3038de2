"""Draft trees of a model that runs beside the target: a smaller one, or a head that reads the target's hidden states.

The model's keys and values lie in the pages of the target's, each in the place of its token: what a sequence shares,
gives up or finds again of one, it does of the other, and nothing is allocated here. What is known of the draft model's
is noted by page. Where a cached prefix lacks it, a smaller model reads the tokens again; a head, whose features are
gone, attends to the pages behind.

A tree grows as in EAGLE-2 (arXiv 2406.16858): of each level the most probable nodes are followed, and of all nodes the
most probable ones are drafted. Each level computes the whole tree again, since no runner masks entries that are in
pages. A model that is small enough to draft reads its weights for longer than it computes a few more tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from draftwood_model_runner.errors import ModelError
from draftwood_model_runner.runners.base import HeadParts, Runner, StepBatch
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.sequence import Sequence
from draftwood_model_runner.step_measuring import LevelShares
from draftwood_model_runner.tree_growth import Logits, TreeGrowth
from draftwood_strategies.arrays import Float32Array, Int32Array
from draftwood_strategies.draft import DraftTree, DraftTrees
from draftwood_strategies.draft_engine.step_times import MeasuredStepTimes

LogProbabilities: TypeAlias = Callable[[Any, Int32Array], Float32Array]
_READ_AT_ONCE = 512
"""Entries of a sequence that a pass reads at most. One with more has no draft until they are read."""
_UNREAD = 128
"""Entries that a sequence leaves unread at most, while it has no drafts: a pass for so few tokens would cost more than
it tells of how good drafts would be. With 32, code edits took 1.8% longer than without a head, with 128 0.5% less."""
_COMBINED = 32
"""Entries whose features are combined at once, while nothing reads them: each time it reads weights, as many bytes as
1.5% of those of a model of 135 million."""
_TOLD = 32
"""Tokens of a pass, the latest, of which it is noted whether drafts would have had them right."""


class Computed(NamedTuple):
    """What a step of the target computed of a sequence, and committed.

    Attributes:
        position: of its first token.
        tokens: int64[n], which tokens of the step these are.
    """

    sequence: Sequence
    position: int
    tokens: npt.NDArray[np.int64]


@dataclass(eq=False, slots=True)
class _Row:
    """What the draft model has of a sequence. Entry i is that of token i; for those of heads see `loading.draft_heads`.

    Attributes:
        generation: of the sequence's slot, see `Sequence.slot_generation`.
        first: the first page that it attends to.
        computed: entries whose keys and values are there, those before `first` aside.
        pages: of the page table, whose flags were set.
        unread: of a head: float32[n, d], hidden states of the entries from `computed` on.
        fresh: of a head: features of the entries behind those, of one step after the other, not yet combined.
        last: of a head: float32[d], the hidden state of entry `computed` - 1.
        roots: the predictions behind that entry.
        agreed_from, agreed: see `ModelSource.agreed`.
    """

    generation: int = -1
    first: int = 0
    computed: int = 0
    pages: int = 0
    unread: Float32Array | None = None
    fresh: list[Any] = field(default_factory=list)
    last: Float32Array | None = None
    roots: Logits | None = None
    agreed_from: int = 0
    agreed: list[bool] = field(default_factory=list)

    @property
    def kept(self) -> int:
        """Entries from `computed` on whose hidden states or features are there."""
        return (0 if self.unread is None else self.unread.shape[0]) + sum(map(len, self.fresh))


class ModelDrafts:
    """The drafts of one model for all sequences of an engine; a `ModelSource` whose rows are `Sequence`s.

    Args:
        runner: of the draft model, with at least the pages of the target's and of their size.
        log_probabilities: see `sampling.most_probable.log_probabilities`.
        head: None for a whole model.
        width: nodes of a level that the next one follows, and of which it has children each.
    """

    def __init__(
        self, runner: Runner, log_probabilities: LogProbabilities, head: HeadParts | None = None, width: int = 4
    ) -> None:
        self._runner, self._log_probabilities = runner, log_probabilities
        self._width = width
        self._head = head
        self._rows: dict[Sequence, _Row] = {}
        self._complete = np.zeros(runner.pages, np.bool_)
        self._failed: set[Sequence] = set()
        self.shares = LevelShares()

    def open(self, sequence: Sequence) -> None:
        """Reads what a sequence writes from now on, until `pause` or `close`; not if it failed for it."""
        if sequence not in self._failed:
            self._rows.setdefault(sequence, _Row())

    def pause(self, sequence: Sequence) -> None:
        """Reads no further until a sequence is opened again. Does nothing for one that is not open."""
        self._rows.pop(sequence, None)

    def close(self, sequence: Sequence) -> None:
        """Forgets a sequence that needs no drafts any more."""
        self._failed.discard(sequence)
        self.pause(sequence)

    def forget(self, sequences: SequenceOf[Sequence]) -> None:
        """A step of these failed: there are no drafts for them any more, and nothing is known of any page."""
        self._complete[:] = False
        for sequence in sequences:
            if self._rows.pop(sequence, None) is not None:
                self._failed.add(sequence)

    def check(self, live: SequenceOf[Sequence]) -> None:
        """Asserts that live sequences alone are known."""
        assert self._rows.keys() | self._failed <= {*live}

    def measure(self, step_times: MeasuredStepTimes, most_rows: int) -> None:
        """Measures what levels cost, before there are sequences."""
        self.shares = LevelShares.measured(self._level_seconds, step_times, most_rows)

    def _level_seconds(self, rows: int) -> float:
        """What a level takes of so many rows, on dummy tokens."""
        size = self._runner.page_size
        tables = [np.array([2 * i, 2 * i + 1], np.int32) % self._runner.pages for i in range(rows)]
        tree = DraftTree.of(list(range(self._width)), [-1] * self._width)
        batch = lay_out([BatchRow(table, size, np.zeros(1, np.int32), tree, logits_from=1) for table in tables])
        features = None
        if self._head is not None:
            features = self._features(batch.tokens, np.zeros((batch.size, self._head.width), np.float32))
        started = time.perf_counter()
        self._pass(replace(batch, is_dummy=True, features=features))
        return time.perf_counter() - started

    def reads_features(self, sequences: SequenceOf[Sequence]) -> bool:
        """Whether it reads features of a step of the target that computes these."""
        return self._head is not None and any(sequence in self._rows for sequence in sequences)

    def observe(self, computed: SequenceOf[Computed], features: Any) -> None:
        """What the target computed in a step, told before any of the sequences loses its slot.

        Args:
            computed: of all sequences that may go on, or whose pages others may find.
            features: [T, f], of the step, see `StepInFlight.features`; None if there are none.
        """
        behind = []
        for sequence, position, tokens in computed:
            if (row := self._rows.get(sequence)) is None:
                # What their pages held before, perhaps another tenant's, must not be taken for theirs.
                self._complete[sequence.kv.pages[position // self._runner.page_size :]] = False
                continue
            self._follow_pages(sequence, row)
            if self._head is not None and features is not None:
                self._keep(row, position, features[tokens])
            if self._readable(sequence, row) - row.computed > 2 * _UNREAD:
                behind.append(sequence)
        if behind:
            self._read(behind)

    def level_share(self, rows: int | None = None) -> float:
        return self.shares.at(rows)

    def reads(self, row: Sequence) -> bool:
        return row in self._rows or row in self._failed

    def position(self, row: Sequence) -> int:
        return row.length

    def agreed(self, row: Sequence) -> tuple[int, list[bool]]:
        state = self._rows[row]
        agreed, state.agreed = state.agreed, []
        return state.agreed_from, agreed

    def draft(
        self, rows: SequenceOf[Sequence], budgets: Int32Array, levels: Int32Array, least: Float32Array
    ) -> DraftTrees:
        unread = [self._unread(sequence) for sequence in rows]
        if not levels.any() and max(unread) < _UNREAD:
            return DraftTrees.empty(len(rows))
        started, reading = time.perf_counter(), [row for row, entries in zip(rows, unread, strict=True) if entries]
        if reading:
            self._read(reading)
        passes = int(bool(reading))
        behind = [self._rows[sequence].roots for sequence in rows]
        drafted = [i for i, roots in enumerate(behind) if levels[i] and roots and not self._unread(rows[i])]
        if not drafted:
            return DraftTrees.empty(len(rows))
        roots = Logits.joined([roots for i in drafted if (roots := behind[i]) is not None])
        tree = TreeGrowth(roots, self._width, levels[drafted], least[drafted], self._room([rows[i] for i in drafted]))
        while (active := tree.next_level()).size:
            tree.add(active, self._level([rows[drafted[i]] for i in active.tolist()], tree, active))
            passes += 1
        if passes and max(unread) <= _TOLD:  # reading more takes longer than a level
            self.shares.observe_level((time.perf_counter() - started) / passes)
        return DraftTrees.scattered([(drafted, tree.best(budgets[drafted]))], len(rows))

    def _unread(self, sequence: Sequence) -> int:
        """Entries of a sequence that can be computed, and were not."""
        if (row := self._rows.get(sequence)) is None:
            raise ModelError("the draft model failed in an earlier step of this sequence")
        self._follow_pages(sequence, row)
        return max(0, self._readable(sequence, row) - row.computed)

    def _readable(self, sequence: Sequence, row: _Row) -> int:
        """Entries that can be computed by now, or fewer than are: a head that begins in the middle of a page keeps none
        up to its end. Behind a window, a long prompt gets its pages step by step."""
        if self._head is None:
            return min(sequence.length, sequence.kv.pages.size * self._runner.page_size)
        return min(row.computed + row.kept, sequence.length - 1)

    def _follow_pages(self, sequence: Sequence, row: _Row) -> None:
        """Sets what is known of pages that the sequence got since the last look."""
        table = sequence.kv
        if row.generation != sequence.slot_generation:
            shared = table.shared
            known = self._complete[np.maximum(table.pages[:shared], 0)] & (table.pages[:shared] >= 0)
            missing = np.flatnonzero(~known)
            row.generation, row.pages = sequence.slot_generation, shared
            row.unread = row.last = row.roots = None
            row.fresh = []
            if self._head is None:
                row.first, row.computed = 0, int(missing[0]) if missing.size else shared
            else:
                row.first, row.computed = int(missing[-1]) + 1 if missing.size else 0, shared
            row.computed *= self._runner.page_size
        if table.pages.size > row.pages:
            self._complete[table.pages[row.pages :]] = False
            row.pages = table.pages.size
        row.first = max(row.first, table.freed)
        if (skipped := row.first * self._runner.page_size - row.computed) > 0:  # behind the target's window
            self._combine(row)
            row.computed += skipped
            row.unread = None if row.unread is None else row.unread[skipped:]

    def _keep(self, row: _Row, position: int, features: Any) -> None:
        """Keeps features, [n, f], of the entries from `position` on."""
        if row.computed + row.kept != position:  # those of tokens in between are not known
            size = self._runner.page_size
            row.first = -(-position // size)
            row.computed, row.unread, row.fresh, row.last = row.first * size, None, [], None
            features = features[row.computed - position :]
        row.fresh.append(features)
        if sum(map(len, row.fresh)) >= _COMBINED:
            self._combine(row)

    def _combine(self, row: _Row) -> None:
        """Makes hidden states of the features that are kept."""
        if self._head is not None and row.fresh:
            hidden = self._head.combine(row.fresh)
            row.unread = hidden if row.unread is None else np.concatenate([row.unread, hidden])
            row.fresh = []

    def _read(self, sequences: SequenceOf[Sequence]) -> None:
        """Computes entries of these, at least one each, and keeps the predictions behind the last one of each."""
        rows = [self._rows[sequence] for sequence in sequences]
        for row in rows:
            self._combine(row)
        counts = [
            min(self._readable(sequence, row) - row.computed, _READ_AT_ONCE)
            for sequence, row in zip(sequences, rows, strict=True)
        ]
        ahead = int(self._head is not None)
        tokens = [s.tokens(row.computed + ahead, n) for s, row, n in zip(sequences, rows, counts, strict=True)]
        firsts = np.array([row.computed for row in rows], np.int32)
        sizes = np.array(counts, np.int32)
        cu_seqlens = np.cumsum([0, *counts], dtype=np.int32)
        within = np.arange(cu_seqlens[-1], dtype=np.int32) - np.repeat(cu_seqlens[:-1], sizes)
        # Predictions of written tokens tell how good drafts would be.
        told = [
            min(n, max(1, row.computed + n + 1 + ahead - int(s.request.prompt.size)), _TOLD)
            for s, row, n in zip(sequences, rows, counts, strict=True)
        ]
        logit_rows = np.concatenate([np.arange(end - n, end) for end, n in zip(cu_seqlens[1:], told, strict=True)])
        hidden = None
        if self._head is not None:
            hidden = np.concatenate(
                [row.unread[:n] for row, n in zip(rows, counts, strict=True) if row.unread is not None]
            )
        batch = self._batch(
            sequences,
            tokens=np.concatenate(tokens),
            positions=within + np.repeat(firsts, sizes),
            parents=within - np.int32(1),
            cu_seqlens=cu_seqlens,
            contexts=firsts,
            logit_rows=logit_rows.astype(np.int32),
            hidden=hidden,
        )
        logits = self._pass(batch)
        ends = np.cumsum(told).tolist()
        for sequence, row, n, end, tell in zip(sequences, rows, counts, ends, told, strict=True):
            self._note_agreement(sequence, row, row.computed + n + ahead, logits.tokens[end - tell : end])
            self._advance(sequence, row, n)
            row.roots = logits.part([end - 1])

    def _note_agreement(self, sequence: Sequence, row: _Row, end: int, predicted: Int32Array) -> None:
        """Compares predictions of the tokens up to position `end`, that one included, with those that are known.

        Args:
            predicted: int32[n, width], the most probable ones of each, which a draft would have.
        """
        start = end - len(predicted) + 1
        known = sequence.tokens(start, min(len(predicted), sequence.length - start))
        if row.agreed_from + len(row.agreed) != start:
            row.agreed = []
        if not row.agreed:
            row.agreed_from = start
        row.agreed += (predicted[: known.size] == known[:, None]).any(axis=1).tolist()

    def _advance(self, sequence: Sequence, row: _Row, entries: int) -> None:
        size, begin = self._runner.page_size, max(row.computed // self._runner.page_size, row.first)
        row.computed += entries
        self._complete[sequence.kv.pages[begin : row.computed // size]] = True
        if row.unread is not None:
            row.last, row.unread = row.unread[entries - 1], row.unread[entries:]

    def _room(self, sequences: SequenceOf[Sequence]) -> Int32Array:
        """Nodes that there are entries for in the pages of each, int32[s]."""
        size = self._runner.page_size
        return np.array([s.kv.pages.size * size - self._rows[s].computed for s in sequences], np.int32)

    def _level(self, sequences: SequenceOf[Sequence], tree: TreeGrowth, active: npt.NDArray[np.int64]) -> Logits:
        """Predictions behind the nodes that some rows of a tree follow, and what these hand on."""
        nodes, rows = tree.followed, [self._rows[sequence] for sequence in sequences]
        per_row, ahead = 1 + nodes, int(self._head is not None)
        lasts = np.array([row.computed - 1 for row in rows], np.int32)
        tokens, parents, depths = np.empty((3, len(rows), per_row), np.int32)
        tokens[:, 0] = [int(s.tokens(last + ahead, 1)[0]) for s, last in zip(sequences, lasts.tolist(), strict=True)]
        parents[:, 0], depths[:, 0] = -1, 0
        tokens[:, 1:], parents[:, 1:], depths[:, 1:] = tree.path_arrays(active)
        logit_rows = np.arange(tokens.size, dtype=np.int32).reshape(tokens.shape)[:, per_row - tree.width :]
        hidden: Float32Array | None = None
        if self._head is not None:
            hidden = np.empty((len(rows), per_row, tree.hidden_width), np.float32)
            hidden[:, 0] = [row.last for row in rows]
            hidden[:, 1:] = tree.hidden_of_parents(active)
            hidden = np.reshape(hidden, (tokens.size, -1))
        batch = self._batch(
            sequences,
            tokens=tokens.ravel(),
            positions=(lasts[:, None] + depths).ravel(),
            parents=parents.ravel(),
            cu_seqlens=np.arange(0, tokens.size + 1, per_row, dtype=np.int32),
            contexts=lasts,
            logit_rows=logit_rows.ravel(),
            hidden=hidden,
        )
        return self._pass(batch)

    def _batch(
        self,
        sequences: SequenceOf[Sequence],
        tokens: Int32Array,
        positions: Int32Array,
        parents: Int32Array,
        cu_seqlens: Int32Array,
        contexts: Int32Array,
        logit_rows: Int32Array,
        hidden: Float32Array | None,
    ) -> StepBatch:
        """A batch whose rows have `contexts` entries before it, those in pages before the first one included."""
        size = self._runner.page_size
        firsts = np.array([self._rows[sequence].first for sequence in sequences], np.int32)
        ends = -(-(contexts + cu_seqlens[1:] - cu_seqlens[:-1]) // size)
        tables = [s.kv.pages[first:end] for s, first, end in zip(sequences, firsts, ends, strict=True)]
        return StepBatch(
            tokens=tokens,
            positions=positions.astype(np.int32),
            parents=parents,
            cu_seqlens=cu_seqlens,
            context_lens=(contexts - firsts * size).astype(np.int32),
            block_table=np.concatenate(tables),
            cu_blocks=np.cumsum([0, *map(len, tables)], dtype=np.int32),
            logit_rows=logit_rows,
            features=None if hidden is None else self._features(tokens, hidden),
        )

    def _features(self, tokens: Int32Array, hidden: Float32Array) -> Float32Array:
        """What a head reads of tokens, int32[n], beside their hidden states, float32[n, d]."""
        assert self._head is not None
        return hidden if self._head.embed is None else np.concatenate([self._head.embed(tokens), hidden], 1)

    def _pass(self, batch: StepBatch) -> Logits:
        predictions = self._runner.step(batch, self._width)
        assert predictions.top_tokens is not None
        top, hidden = predictions.top_tokens[:, : self._width].copy(), predictions.features  # some runners give more
        chances = self._log_probabilities(predictions.logits, top)
        if self._head is None or hidden is None:
            return Logits(top, chances, None)
        return Logits(self._head.token_ids[top], chances, hidden.copy())
