"""The trie strategy: drafts what was written before in the same context, by the sequence itself or by its tenant.

Each live sequence has a small phrase index of its prompt and output; the tenant's memory is one phrase index of all
outputs, which grows while they are written. Candidates of both vote on every node of a draft. As in Lookahead (Alipay,
arXiv 2312.12728), but with all context lengths mixed instead of two.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Annotated, Literal

import numpy as np

from draftwood_strategies.base import Feedback
from draftwood_strategies.draft import DraftTree
from draftwood_strategies.native import Int32Array
from draftwood_strategies.options import Range, check, read_options
from draftwood_strategies.registry import register
from draftwood_strategies.trie.candidates import COLUMNS
from draftwood_strategies.trie.expansion import AT_END, WRITTEN, expand
from draftwood_strategies.trie.learning import Votes, WritableIndex, learn
from draftwood_strategies.trie.phrase_index import LEAST_TOKENS, START, PhraseIndex
from draftwood_strategies.trie.prior import prior_weights
from draftwood_strategies.trie.weights import Weights
from draftwood_strategies.trie.workspace import DEEPEST, Workspace, empty_draft, workspace_for

_OWN_CAPACITY = 1 << 20
"""Tokens of a sequence's own index; more than any context."""
_EVERYTHING = 1 << 40
_START = np.array([START], np.int32)
_NO_ROOTS = np.empty((0, COLUMNS), np.int32)
_NO_DRAFT = empty_draft(0)
_thread = threading.local()


def _workspace(budget: int) -> Workspace:
    """This thread's workspace for drafts of up to `budget` nodes."""
    if getattr(_thread, "budget", 0) < budget:
        _thread.budget = max(budget, 64)
        _thread.workspace = workspace_for(_thread.budget)
    workspace: Workspace = _thread.workspace
    return workspace


@register("trie")
class TrieStrategy:
    """One tenant's memory of phrases and learned weights.

    Args:
        branch_length: the deepest draft, in tokens, 1 to 256.
        learn: the part of each sequence that the memory learns, "outputs", "prompts" or "both".
        prompt_weight: multiplies the votes of the own prompt at first; online learning goes on from there. In
            (0, 1000).
        capacity_tokens: how many tokens the memory holds; the oldest leave first. At least 64.

    Raises:
        ValueError: an option's value is not allowed.
    """

    top_k = 0

    def __init__(
        self,
        *,
        branch_length: Annotated[int, Range(1, DEEPEST)] = 32,
        learn: Literal["outputs", "prompts", "both"] = "outputs",
        prompt_weight: Annotated[float, Range(0, 1000, open=True)] = 1.0,
        capacity_tokens: Annotated[int, Range(least=LEAST_TOKENS)] = 1_000_000,
    ) -> None:
        given = {"branch_length": branch_length, "learn": learn, "prompt_weight": prompt_weight}
        check(read_options(TrieStrategy), given | {"capacity_tokens": capacity_tokens})
        self.branch_length = branch_length
        self.learns = learn
        self.memory = PhraseIndex(capacity_tokens)
        self.weights: Weights = prior_weights(prompt_weight)

    @property
    def tokens(self) -> int:
        """How many tokens the memory holds."""
        return self.memory.tokens

    @property
    def nbytes(self) -> int:
        """Bytes of the memory, the weights included, live sequences' own indexes not."""
        return self.memory.nbytes + sum(table.nbytes for table in self.weights)

    def sequences(self) -> Iterator[Int32Array]:
        """The sequences in the memory, int32[n] each, the oldest first; `learn` takes them again."""
        return self.memory.sequences()

    def learn(self, tokens: Int32Array) -> None:
        """Adds a whole recorded sequence, int32[n], to the memory."""
        writer = self.memory.writer()
        self.memory.append(writer, _START)
        self.memory.append(writer, tokens)

    def start(self, prompt: Int32Array) -> TrieDrafter:
        return TrieDrafter(self, prompt)

    def start_reading(self, prompt: Int32Array) -> TrieDrafter:
        return TrieDrafter(self, prompt, learns=False)


class TrieDrafter:
    """Drafts for one sequence, and writes it into the tenant's memory as it grows, if it `learns`."""

    def __init__(self, strategy: TrieStrategy, prompt: Int32Array, learns: bool = True) -> None:
        self._strategy = strategy
        self._weights = strategy.weights if learns else Weights(*(table.copy() for table in strategy.weights))
        self._remembers = learns and strategy.learns != "prompts"
        self._own = PhraseIndex(_OWN_CAPACITY, prompt.shape[0] + 256)
        self._own_writer = self._own.writer()
        self._own.append(self._own_writer, prompt)
        self._writer = strategy.memory.writer()
        learned = {"outputs": 0, "prompts": _EVERYTHING, "both": prompt.shape[0]}[strategy.learns]
        if learns and strategy.learns != "outputs":
            strategy.memory.append(self._writer, _START)
            strategy.memory.append(self._writer, prompt)
        self._state = np.array([self._own_writer[0], self._writer[1], self._own_writer[0] + 1, learned], np.int64)
        self._followed = np.array([-1, -1, 0, 0], np.int64)
        self._roots, self._draft = _NO_ROOTS, _NO_DRAFT

    def propose(self, budget: int) -> DraftTree:
        strategy, workspace, draft = self._strategy, _workspace(budget), empty_draft(budget)
        n, found = expand(
            own=self._own.arrays,
            memory=strategy.memory.arrays,
            weights=self._weights,
            workspace=workspace,
            state=self._state,
            followed=self._followed,
            branch_length=strategy.branch_length,
            draft=draft,
        )
        self._draft = draft.cut(n)
        self._roots = workspace.roots[:found].copy()
        return DraftTree(self._draft.tokens, self._draft.parents, self._draft.scores)

    def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
        strategy, workspace = self._strategy, _workspace(1)
        memory, own, written = strategy.memory, self._own, accepted.shape[0]
        own.reserve(written)
        if self._remembers:
            if self._writer[0] < 0:
                memory.append(self._writer, _START)
            memory.reserve(written)
        learn(
            own=WritableIndex(own.arrays, own.ring, self._own_writer),
            memory=WritableIndex(memory.arrays, memory.ring, self._writer),
            remember=self._remembers,
            weights=self._weights,
            followed=self._followed,
            candidates=self._roots,
            draft=self._draft,
            accepted=accepted,
            branch_length=strategy.branch_length,
            votes=Votes(workspace.trust, workspace.chain, workspace.heap),
        )
        self._roots, self._draft = _NO_ROOTS, _NO_DRAFT
        self._state[AT_END] = self._own_writer[0]
        self._state[WRITTEN] += written

    def close(self) -> None:
        """The memory keeps what was learned."""
