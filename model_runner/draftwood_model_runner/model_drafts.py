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
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from draftwood_model_runner.errors import ModelError
from draftwood_model_runner.runners.base import HeadParts, Runner, StepBatch
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies.arrays import Float32Array, Int32Array
from draftwood_strategies.draft import DraftTrees

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
_TIMED = 15
"""Levels and steps, the latest, of whose times the median counts: single ones wait for the rest of the machine."""
_LEAST_TOGETHER = 1e-3
"""Probability of the nodes of a level below which no other follows, while it is not known what levels cost."""


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
    roots: _Logits | None = None
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
        self._step_seconds, self._level_seconds = deque[float](maxlen=_TIMED), deque[float](maxlen=_TIMED)

    def open(self, sequence: Sequence) -> None:
        """A sequence may be drafted for from now on, until `close`."""
        self._rows.setdefault(sequence, _Row())

    def close(self, sequence: Sequence) -> None:
        """Forgets a sequence; does nothing for one that is not open."""
        self._rows.pop(sequence, None)

    def forget(self, sequences: SequenceOf[Sequence]) -> None:
        """A step of these failed: they are closed, and nothing is known of any page."""
        self._complete[:] = False
        for sequence in sequences:
            self.close(sequence)

    def check(self, live: SequenceOf[Sequence]) -> None:
        """Asserts that live sequences alone are open."""
        assert self._rows.keys() <= {*live}

    def observe_step(self, seconds: float) -> None:
        """A step of the target that only decoded took so long."""
        self._step_seconds.append(seconds)

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

    def level_share(self) -> float:
        if not self._step_seconds or not self._level_seconds:
            return 0.0
        return median(self._level_seconds) / median(self._step_seconds)

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
        roots = _Logits.joined([roots for i in drafted if (roots := behind[i]) is not None])
        tree = _Growth(roots, self._width, levels[drafted], least[drafted], self._room([rows[i] for i in drafted]))
        while (active := tree.next_level()).size:
            tree.add(active, self._level([rows[drafted[i]] for i in active.tolist()], tree, active))
            passes += 1
        if passes and max(unread) <= _TOLD:  # reading more takes longer than a level
            self._level_seconds.append((time.perf_counter() - started) / passes)
        return DraftTrees.scattered([(drafted, tree.best(budgets[drafted]))], len(rows))

    def _unread(self, sequence: Sequence) -> int:
        """Entries of a sequence that can be computed, and were not."""
        if (row := self._rows.get(sequence)) is None:
            raise ModelError("the draft model failed in an earlier step of this sequence")
        self._follow_pages(sequence, row)
        return self._readable(sequence, row) - row.computed

    def _readable(self, sequence: Sequence, row: _Row) -> int:
        """Entries that can be computed by now. Behind a window, a long prompt gets its pages step by step."""
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

    def _level(self, sequences: SequenceOf[Sequence], tree: _Growth, active: npt.NDArray[np.int64]) -> _Logits:
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
        features = None
        if self._head is not None:
            assert hidden is not None
            features = hidden if self._head.embed is None else np.concatenate([self._head.embed(tokens), hidden], 1)
        return StepBatch(
            tokens=tokens,
            positions=positions.astype(np.int32),
            parents=parents,
            cu_seqlens=cu_seqlens,
            context_lens=(contexts - firsts * size).astype(np.int32),
            block_table=np.concatenate(tables),
            cu_blocks=np.cumsum([0, *map(len, tables)], dtype=np.int32),
            logit_rows=logit_rows,
            features=features,
        )

    def _pass(self, batch: StepBatch) -> _Logits:
        predictions = self._runner.step(batch, self._width)
        assert predictions.top_tokens is not None
        top, hidden = predictions.top_tokens[:, : self._width].copy(), predictions.features  # some runners give more
        chances = self._log_probabilities(predictions.logits, top)
        if self._head is None or hidden is None:
            return _Logits(top, chances, None)
        return _Logits(self._head.token_ids[top], chances, hidden.copy())


class _Logits(NamedTuple):
    """The most probable tokens behind r tokens of a pass.

    Attributes:
        tokens: int32[r, k], best first.
        log_probabilities: float32[r, k].
        hidden: float32[r, d], what a head hands on; None for a whole model.
    """

    tokens: Int32Array
    log_probabilities: Float32Array
    hidden: Float32Array | None

    @classmethod
    def joined(cls, parts: SequenceOf[_Logits]) -> _Logits:
        """Those of several passes."""
        hidden = [part.hidden for part in parts if part.hidden is not None]
        return cls(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.log_probabilities for part in parts]),
            np.concatenate(hidden) if hidden else None,
        )

    def part(self, rows: SequenceOf[int]) -> _Logits:
        """Those of some of the tokens."""
        hidden = None if self.hidden is None else self.hidden[rows]
        return _Logits(self.tokens[rows], self.log_probabilities[rows], hidden)


class _Growth:
    """Trees of s rows that grow level by level; all have the same number of followed nodes.

    Args:
        roots: predictions behind the texts.
        width: nodes that a level follows.
        levels: int32[s], at most.
        least: float32[s], see `ModelSource.draft`.
        room: int32[s], nodes that can be followed at most.

    Attributes:
        followed: nodes of each row that were followed, those of the level that is being computed included.
    """

    def __init__(self, roots: _Logits, width: int, levels: Int32Array, least: Float32Array, room: Int32Array) -> None:
        rows = roots.tokens.shape[0]
        self.width, self.followed = width, 0
        self._levels, self._least, self._room = levels, least, room
        self._depth = 1
        self._tokens, self._logs = roots.tokens, roots.log_probabilities
        self._parents: Int32Array = np.full(roots.tokens.shape, -1, np.int32)
        self._newest = slice(0, roots.tokens.shape[1])
        # Of followed nodes: the column of each among all nodes, the followed node above it, its depth.
        self._columns, self._above, self._depths = np.empty((3, rows, 0), np.int32)
        self._roots = roots.hidden
        self._hidden = None if roots.hidden is None else np.empty((rows, 0, roots.hidden.shape[1]), np.float32)

    @property
    def hidden_width(self) -> int:
        return 0 if self._roots is None else int(self._roots.shape[1])

    def next_level(self) -> npt.NDArray[np.int64]:
        """Chooses what the next level follows; returns the rows that have one, none at the end."""
        logs = self._logs[:, self._newest]
        best = np.argsort(-logs, axis=1, kind="stable")[:, : self.width]
        together = np.exp(np.take_along_axis(logs, best, axis=1)).sum(axis=1)
        deeper = (self._levels > self._depth) & (together > np.maximum(self._least, _LEAST_TOGETHER))
        active = np.flatnonzero(deeper & (self._room >= self.followed + self.width))
        if active.size:
            columns = (best + self._newest.start).astype(np.int32)
            self._columns = np.concatenate([self._columns, columns], axis=1)
            self._above = np.concatenate([self._above, self._followed_above(columns)], axis=1)
            self._depths = np.concatenate([self._depths, np.full_like(columns, self._depth)], axis=1)
            self.followed += self.width
            self._depth += 1
        return active

    def _followed_above(self, columns: Int32Array) -> Int32Array:
        """Of nodes, int32[s, width], the followed node that is their parent; -1 for the root."""
        parents = np.take_along_axis(self._parents, columns.astype(np.int64), axis=1)
        above: Int32Array = np.full_like(parents, -1)
        if self.followed:
            found = self._columns[:, None, : self.followed] == parents[:, :, None]
            above = np.where(parents < 0, -1, found.argmax(axis=2)).astype(np.int32)
        return above

    def path_arrays(self, rows: npt.NDArray[np.int64]) -> tuple[Int32Array, Int32Array, Int32Array]:
        """int32[rows, followed]: tokens; parents, counted in a row of a batch behind the token of the root; depths."""
        columns = self._columns[rows]
        tokens = np.take_along_axis(self._tokens[rows], columns.astype(np.int64), axis=1)
        return tokens, self._above[rows] + np.int32(1), self._depths[rows]

    def hidden_of_parents(self, rows: npt.NDArray[np.int64]) -> Float32Array:
        """float32[rows, followed, d], what the parents of followed nodes hand on."""
        assert self._roots is not None
        assert self._hidden is not None
        known = np.concatenate([self._roots[:, None], self._hidden], axis=1)[rows]
        index = (self._above[rows] + 1).astype(np.int64)
        taken: Float32Array = np.take_along_axis(known, index[:, :, None], axis=1)
        return taken

    def add(self, rows: npt.NDArray[np.int64], logits: _Logits) -> None:
        """The predictions behind the nodes that some rows followed latest."""
        all_rows, width, children = self._tokens.shape[0], self.width, logits.tokens.shape[1]
        tokens = np.zeros((all_rows, width * children), np.int32)
        logs = np.full(tokens.shape, -np.inf, np.float32)
        tokens[rows] = logits.tokens.reshape(rows.size, -1)
        latest = self._columns[:, -width:]
        above = np.take_along_axis(self._logs, latest.astype(np.int64), axis=1)[rows]
        logs[rows] = (above[:, :, None] + logits.log_probabilities.reshape(rows.size, width, -1)).reshape(rows.size, -1)
        self._newest = slice(self._tokens.shape[1], self._tokens.shape[1] + tokens.shape[1])
        self._tokens = np.concatenate([self._tokens, tokens], axis=1)
        self._logs = np.concatenate([self._logs, logs], axis=1)
        self._parents = np.concatenate([self._parents, np.repeat(latest, children, axis=1)], axis=1)
        if self._hidden is not None and logits.hidden is not None:
            hidden = np.zeros((all_rows, width, self.hidden_width), np.float32)
            hidden[rows] = logits.hidden.reshape(rows.size, width, -1)
            self._hidden = np.concatenate([self._hidden, hidden], axis=1)

    def best(self, budgets: Int32Array) -> DraftTrees:
        """The most probable nodes of each row, with their parents; at most `budgets`, int32[s]."""
        ranks = np.argsort(np.argsort(-self._logs, axis=1, kind="stable"), axis=1)
        taken = (ranks < budgets[:, None]) & np.isfinite(self._logs)
        places = np.cumsum(taken, axis=1, dtype=np.int32) - np.int32(1)
        above = np.take_along_axis(places, np.maximum(self._parents, 0).astype(np.int64), axis=1)
        parents = np.where(self._parents < 0, -1, above).astype(np.int32)
        offsets = np.concatenate([[0], np.cumsum(taken.sum(axis=1))]).astype(np.int32)
        scores = np.exp(np.minimum(self._logs, 0.0)).astype(np.float32)
        return DraftTrees(self._tokens[taken], parents[taken], scores[taken], offsets)
