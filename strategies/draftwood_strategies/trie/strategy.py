"""The trie strategy: drafts what was written before in the same context, by the sequence itself or by its tenant.

Each live sequence has a small phrase index of its prompt and output; the tenant's memory is one phrase index of all
outputs, which grows while they are written. Candidates of both vote on every node of a draft. As in Lookahead (Alipay,
arXiv 2312.12728), but with all context lengths mixed instead of two.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import Annotated, Literal

import numpy as np

from draftwood_strategies.base import Feedback, StepFeedback
from draftwood_strategies.draft import DraftTree, DraftTrees
from draftwood_strategies.native import Int32Array, Int64Array
from draftwood_strategies.options import Range, check, read_options
from draftwood_strategies.registry import register
from draftwood_strategies.structs import Struct
from draftwood_strategies.trie.batches import draft_all, learn_all, next_without_space
from draftwood_strategies.trie.phrase_index import LEAST_TOKENS, START, PhraseIndex
from draftwood_strategies.trie.sequence import TrieSequence
from draftwood_strategies.trie.weights import Weights, prior_weights
from draftwood_strategies.trie.workspace import DEEPEST, Workspace, workspace_for

_EVERYTHING = 1 << 40
_START = np.array([START], np.int32)
_NOTHING = np.empty(0, np.int32)
_thread = threading.local()


def _workspace(budget: int) -> Struct[Workspace]:
    """This thread's workspace for drafts of up to `budget` nodes."""
    if getattr(_thread, "budget", 0) < budget:
        _thread.budget = max(budget, 64)
        _thread.workspace = Struct(workspace_for(_thread.budget))
    workspace: Struct[Workspace] = _thread.workspace
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
        self.learned = Struct(prior_weights(prompt_weight))

    @property
    def weights(self) -> Weights:
        """What was learned of votes and scores."""
        return self.learned.fields

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

    def propose_all(self, drafters: SequenceOf[TrieDrafter], budgets: Int32Array) -> DraftTrees:
        if len(drafters) > 1 and not all(drafter.learns for drafter in drafters):
            return DraftTrees.of([drafter.propose(budget) for drafter, budget in zip(drafters, budgets, strict=True)])
        most = budgets.tolist()
        largest = max(most)
        for drafter in drafters:
            if drafter.sequence.struct is None:
                drafter.index_prompt(_EVERYTHING)
            drafter.sequence.reserve_nodes(largest)
        trees, workspace = DraftTrees.with_space(len(drafters), sum(most)), _workspace(largest)
        draft_all(
            _addresses_of(drafters),
            budgets,
            self.memory.struct.address,
            drafters[0].learned.address,
            workspace.address,
            self.branch_length,
            trees.tokens,
            trees.parents,
            trees.scores,
            trees.begins,
        )
        return trees.cut()

    def observe_all(
        self,
        drafters: SequenceOf[TrieDrafter],
        accepted: Int32Array,
        begins: Int32Array,
        feedback: StepFeedback | None = None,
    ) -> None:
        """See `BatchStrategy`. The feedback is not needed."""
        alike = all(drafter.learns and drafter.sequence.struct is not None for drafter in drafters)
        if len(drafters) > 1 and not alike:
            for i, drafter in enumerate(drafters):
                drafter.observe(accepted[begins[i] : begins[i + 1]], None)
            return
        if drafters[0].sequence.struct is None:
            drafters[0].keep(accepted)
            return
        sequences, short = _addresses_of(drafters), -1
        while (short := next_without_space(sequences, begins, short + 1)) >= 0:
            drafters[short].sequence.reserve(int(begins[short + 1] - begins[short]))
        remember = drafters[0].learns and self.learns != "prompts"
        if remember:
            self.memory.reserve(accepted.shape[0] + len(drafters), 2 * len(drafters))
        learn_all(
            sequences,
            accepted,
            begins,
            self.memory.struct.address,
            drafters[0].learned.address,
            _workspace(1).address,
            remember,
            _START,
            self.branch_length,
        )


class TrieDrafter:
    """Drafts for one sequence, and writes it into the tenant's memory as it grows, if it `learns`.

    Attributes:
        learned: the tenant's weights; a copy, unless it `learns`.
    """

    def __init__(self, strategy: TrieStrategy, prompt: Int32Array, learns: bool = True) -> None:
        self._strategy = strategy
        self.learns = learns
        self.learned = strategy.learned if learns else _copy_of(strategy.weights)
        self._writer = strategy.memory.writer()
        self._to_learn = prompt if learns and strategy.learns != "outputs" else _NOTHING
        learned = {"outputs": 0, "prompts": _EVERYTHING, "both": prompt.shape[0]}[strategy.learns]
        self.sequence = TrieSequence(prompt, self._writer, learned)

    def index_prompt(self, most: int) -> int:
        """See `PromptIndexer`. The memory comes first where it learns prompts."""
        learned = self._learn_prompt(most)
        return learned + (self.sequence.index_prompt(most - learned) if learned < most else 0)

    def keep(self, accepted: Int32Array) -> None:
        """Takes what was written before the prompt was indexed."""
        self._learn_prompt(_EVERYTHING)  # comes before the answer in the memory
        if self.learns and self._strategy.learns != "prompts":
            self._write(accepted)
        self.sequence.keep(accepted)

    def _learn_prompt(self, most: int) -> int:
        piece, self._to_learn = self._to_learn[:most], self._to_learn[most:]
        if piece.shape[0]:
            self._write(piece)
        return int(piece.shape[0])

    def _write(self, tokens: Int32Array) -> None:
        """Goes on with the sequence in the memory."""
        if self._writer["at"] < 0:
            self._strategy.memory.append(self._writer, _START)
        self._strategy.memory.append(self._writer, tokens)

    def propose(self, budget: int) -> DraftTree:
        return self._strategy.propose_all([self], np.array([budget], np.int32))[0]

    def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
        self._strategy.observe_all([self], accepted, np.array([0, accepted.shape[0]], np.int32))

    def close(self) -> None:
        """The memory keeps what was learned."""


def _addresses_of(drafters: SequenceOf[TrieDrafter]) -> Int64Array:
    return np.array([drafter.sequence.address for drafter in drafters], np.int64)


def _copy_of(weights: Weights) -> Struct[Weights]:
    return Struct(Weights(*(table.copy() for table in weights)))
