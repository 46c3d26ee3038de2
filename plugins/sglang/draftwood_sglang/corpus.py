"""In place of SGLang's n-gram corpus: returns the trees of a batch, and learns from what was written.

Knows nothing of SGLang but the calls of its corpus. Whatever fails, each request gets a tree without a draft.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from draftwood_memory.engines.drafts import EngineDrafts
from draftwood_memory.engines.session import Row
from draftwood_strategies.arrays import Int32Array, Int64Array
from draftwood_strategies.draft import DraftTrees
from draftwood_strategies.native import compiled

_SPARE = 64
"""Texts of requests that may be kept although they are gone, before they are looked through."""


class Request(Protocol):
    """A request of the engine.

    Attributes:
        request_id: SGLang's, which may come back with another request.
        prompt: its tokens; empty if it has none, as for embeddings.
        written: tokens that the engine shows by now, the latest steps' perhaps not among them.
        max_new_tokens: that it may write.
        stop_token_ids: that end it.
        options: what it carries.
        live: it has not ended. It may be called from another thread, as `output`.
        output: what it wrote, once it has ended.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def prompt(self) -> SequenceOf[int]: ...
    @property
    def written(self) -> SequenceOf[int]: ...
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def stop_token_ids(self) -> Collection[int]: ...
    @property
    def options(self) -> Mapping[str, Any] | None: ...
    @property
    def live(self) -> bool: ...
    @property
    def output(self) -> SequenceOf[int] | None: ...
    def is_of(self, source: object) -> bool:
        """Whether it is this one of SGLang's objects."""

    def keep_alive(self, in_batch: bool) -> None:
        """It is in the batch, or not: then SGLang alone decides how long it lives."""


class _TokenHistory:
    """The tokens of a request, which grow by what its steps write."""

    def __init__(self, request: Request, key: str) -> None:
        self.request, self.key = request, key
        self.prompt, self._max_new_tokens = len(request.prompt), request.max_new_tokens
        self.stop_token_ids = frozenset(request.stop_token_ids)
        self._options = request.options
        self._tokens = np.empty(2 * self.prompt + 256, np.int32)
        self._tokens[: self.prompt] = request.prompt
        self.size = self.engine_size = self.prompt
        self.ended = False

    def follow(self, tail: SequenceOf[int], total: int) -> None:
        """Takes what was written since the last step.

        Args:
            tail: the last tokens of the text.
            total: how many tokens the text has.
        """
        new = total - self.engine_size
        if self.ended and new >= 0:
            return
        if 0 <= new <= len(tail):
            self._append(tail[len(tail) - new :])
        else:
            written = [*self.request.written]
            missing = total - self.prompt - len(written)  # not shown yet, and at the end of the tail
            self.size, self.ended = self.prompt, False
            self._append([*written[: total - self.prompt], *(tail[len(tail) - missing :] if missing > 0 else [])])
        self.engine_size = total

    def _append(self, tokens: SequenceOf[int]) -> None:
        """Up to the end of the answer: SGLang notices that only in the next step, and writes on until then."""
        if self.ended:
            return
        taken = tokens[: max(self.prompt + self._max_new_tokens - self.size, 0)]
        if not self.stop_token_ids.isdisjoint(taken):
            first = next(i for i, token in enumerate(taken) if token in self.stop_token_ids)
            taken, self.ended = taken[: first + 1], True
        size = self.size + len(taken)
        if size > self._tokens.shape[0]:
            self._tokens = np.concatenate([self._tokens, np.empty(size, np.int32)])
        self._tokens[self.size : size] = taken
        self.size = size

    def output(self) -> Int32Array | None:
        """What it wrote, once it has ended."""
        output = self.request.output
        if output is None:
            return None
        if self.prompt + len(output) < self.size:  # cut by SGLang, at a text that ends it
            return np.array(output, np.int32)
        self.follow(output, self.prompt + len(output))
        return self._tokens[self.prompt : self.size].copy()

    @property
    def row(self) -> Row:
        text = self._tokens[: self.size]
        decodes = self.prompt > 0 and self.size > self.prompt
        return Row(self.key, text, self.prompt, self._max_new_tokens, self._options, decodes, self.stop_token_ids)


class Corpus:
    """In the place of `NgramCorpus`.

    Args:
        nodes: of each tree, the last token among them.
        wrap: makes a `Request` of one of SGLang's.

    Attributes:
        drafts: who drafts; None for nobody: trees without drafts.
        requests: SGLang's requests of the batch that is prepared, in its order.
    """

    def __init__(self, nodes: int, wrap: Callable[[Any], Request]) -> None:
        self.drafts: EngineDrafts | None = None
        self.requests: SequenceOf[Any] = ()
        self._nodes = nodes
        self._wrap = wrap
        self._histories: dict[str, _TokenHistory] = {}
        self._by_key: dict[str, _TokenHistory] = {}
        self._serial = 0

    def batch_get(
        self, req_ids: SequenceOf[str], batch_tokens: SequenceOf[SequenceOf[int]], total_lens: SequenceOf[int]
    ) -> FixedTrees:
        """A tree for each request.

        Args:
            req_ids: of `requests`.
            batch_tokens: the last tokens of each.
            total_lens: how many tokens each has.
        """
        drafts = None
        if self.drafts is not None:
            drafts = self.drafts.attempt(lambda: self._rows(req_ids, batch_tokens, total_lens))
        last_tokens = np.array([tail[-1] for tail in batch_tokens], np.int64)
        return fixed_trees(last_tokens, self._nodes, drafts or DraftTrees.empty(len(batch_tokens)))

    def is_live(self, key: str) -> bool:
        """Whether the engine still knows a request, by the key of its `Row`."""
        history = self._by_key.get(key)
        return history is not None and history.request.live

    def output_of(self, key: str) -> Int32Array | None:
        """What a request wrote, once it has ended."""
        history = self._by_key.get(key)
        return None if history is None else history.output()

    def _rows(
        self, req_ids: SequenceOf[str], batch_tokens: SequenceOf[SequenceOf[int]], total_lens: SequenceOf[int]
    ) -> list[Row]:
        batch = zip(req_ids, self.requests, batch_tokens, total_lens, strict=True)
        rows = [self._history(*row).row for row in batch]
        if len(self._by_key) > 2 * len(rows) + _SPARE:
            self._forget()
        return rows

    def _history(self, request_id: str, source: Any, tail: SequenceOf[int], total: int) -> _TokenHistory:
        history = self._histories.get(request_id)
        if history is None or not history.request.is_of(source):
            self._serial += 1
            history = _TokenHistory(self._wrap(source), f"{request_id}/{self._serial}")
            self._histories[request_id] = self._by_key[history.key] = history
        history.request.keep_alive(True)
        history.follow(tail, total)
        return history

    def _forget(self) -> None:
        """Drops texts of requests that have ended and were learned from."""
        sessions = self.drafts.sessions if self.drafts is not None else {}
        for key, history in [*self._by_key.items()]:
            if not history.request.live and key not in sessions:
                del self._by_key[key]
                if self._histories.get(history.request.request_id) is history:
                    del self._histories[history.request.request_id]

    def batch_put(self, batch_tokens: SequenceOf[SequenceOf[int]]) -> None:
        """Nothing to do: `batch_get` takes what was written."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def erase_match_state(self, req_ids: Iterable[str]) -> None:
        """These requests are not in the batch any more: they ended, or come back."""
        for request_id in req_ids:
            if (history := self._histories.get(request_id)) is not None:
                history.request.keep_alive(False)

    def reset(self) -> None:
        """SGLang's caches are cleared. Tenants' learned caches are not the engine's, and stay."""

    def load_external_corpus_named(self, corpus_id: str, chunks: object) -> int:
        """Raises ValueError: memories belong to tenants, and are warmed by `draftwood memory`."""
        raise ValueError("Draftwood's drafts take no external corpus: use `draftwood memory warm`")

    def remove_external_corpus(self, corpus_id: str) -> None:
        """Raises ValueError: there is none."""
        raise ValueError(f"there is no external corpus {corpus_id!r}")

    def commit_external_corpus_load(self, corpus_id: str, loaded_token_count: int) -> None:
        """Nothing was loaded."""

    def list_external_corpora(self) -> dict[str, int]:
        """None."""
        return {}


BoolArray = npt.NDArray[np.bool_]


class FixedTrees(NamedTuple):
    """The trees of s sequences, each with n nodes, of which node 0 is the sequence's last token.

    Attributes:
        tokens: int64[s * n].
        mask: bool[s * n * n]; entry (i, j) of a tree says whether node j is node i or above it.
    """

    tokens: Int64Array
    mask: BoolArray


def fixed_trees(last_tokens: Int64Array, nodes: int, drafts: DraftTrees) -> FixedTrees:
    """Trees of exactly so many nodes.

    Nodes that a draft leaves unused have token 0 and hang from node 0. They are verified like others.

    Args:
        last_tokens: int64[s].
        drafts: of each sequence, at most `nodes` - 1 nodes.
    """
    sequences = last_tokens.shape[0]
    tokens, mask = np.empty(sequences * nodes, np.int64), np.empty(sequences * nodes * nodes, np.bool_)
    _lay_out(last_tokens, drafts.tokens, drafts.parents, drafts.offsets, nodes, tokens, mask)
    return FixedTrees(tokens, mask)


@compiled
def _lay_out(
    last_tokens: Int64Array,
    tree_tokens: Int32Array,
    parents: Int32Array,
    offsets: Int32Array,
    nodes: int,
    tokens: Int64Array,
    mask: BoolArray,
) -> None:
    mask[:] = False
    for node in range(tokens.shape[0]):  # each below node 0
        tokens[node] = last_tokens[node // nodes] if node % nodes == 0 else 0
        mask[node * nodes] = mask[node * nodes + node % nodes] = True
    for t in range(last_tokens.shape[0]):
        first, begin = t * nodes, offsets[t]
        for i in range(offsets[t + 1] - begin):
            node, above = first + i + 1, first + parents[begin + i] + 1
            tokens[node] = tree_tokens[begin + i]
            for j in range(i + 1):
                mask[node * nodes + j] = mask[above * nodes + j]
