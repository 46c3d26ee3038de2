"""The trie strategy: drafts what was written before in the same context, by the sequence itself or by its tenant.

Each live sequence has a small phrase index of its prompt and output; the tenant's memory is one phrase index of all
outputs, which grows while they are written. Candidates of both vote on every node of a draft. As in Lookahead (Alipay,
arXiv 2312.12728), but with all context lengths mixed instead of two.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.base import Feedback, StepFeedback
from draftwood_strategies.built_in import TrieOptions
from draftwood_strategies.draft import DraftTree, DraftTrees, tree_arrays
from draftwood_strategies.native import Struct, Workspaces, addresses_of
from draftwood_strategies.threads import draft_in_threads
from draftwood_strategies.trie.arrays import (
    MOST_ROOTS,
    NOVEL_NODES,
    STATE,
    SequenceArrays,
    empty_draft,
    trie_workspace,
)
from draftwood_strategies.trie.expansion import draft_all
from draftwood_strategies.trie.learning import learn_all
from draftwood_strategies.trie.phrase_index import NOWHERE, PhraseIndex
from draftwood_strategies.trie.retrieval import CANDIDATE
from draftwood_strategies.trie.weights import Weights, prior_weights

_EVERYTHING = 1 << 40
_NOTHING = np.empty(0, np.int32)
_OWN_CAPACITY = 1 << 20
"""Tokens of a sequence's own index; more than any context."""
_EXPECTED = 256
"""Tokens of an answer that its own index has space for at first."""
_LEAST_NODES = 16
"""Of a draft that there is space for."""
_workspaces = Workspaces(trie_workspace, 64)


class TrieStrategy:
    """One tenant's memory of phrases and learned weights.

    Args:
        options: those of `TrieOptions`, by name.

    Attributes:
        backs_off: draft novel tokens, see `weights.Novel`.

    Raises:
        ValueError: an option's value is not allowed.
    """

    top_k = 0

    def __init__(self, **options: Any) -> None:
        self.options = TrieOptions(**options)
        self.backs_off = True
        self.memory = PhraseIndex(self.options.capacity_tokens)
        self.learned = Struct(prior_weights(self.options.prompt_weight))

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
        self.memory.append(self.memory.writer(marked=True), tokens)

    def keep_learned(self, earlier: TrieStrategy) -> None:
        self.learned = earlier.learned

    def start(self, prompt: Int32Array) -> TrieDrafter:
        return TrieDrafter(self, prompt)

    def start_read_only(self, prompt: Int32Array) -> TrieDrafter:
        return TrieDrafter(self, prompt, learns=False)

    def propose_all(self, drafters: SequenceOf[TrieDrafter], budgets: Int32Array) -> DraftTrees:
        sizes = budgets.tolist()
        largest = max(sizes)
        for drafter in drafters:
            drafter.reserve_nodes(largest)
        addresses, memory = addresses_of([drafter.struct for drafter in drafters]), self.memory.struct.address

        def draft(rows: range) -> DraftTrees:
            arrays = tree_arrays(len(rows), sum(sizes[rows.start : rows.stop]))
            draft_all(
                addresses[rows.start : rows.stop],
                budgets[rows.start : rows.stop],
                memory,
                _workspaces.address(largest),
                self.options.branch_length,
                NOVEL_NODES if self.backs_off else 0,
                *arrays,
            )
            return DraftTrees.written(*arrays)

        return DraftTrees.scattered(draft_in_threads(budgets, draft), len(drafters))

    def observe_all(
        self,
        drafters: SequenceOf[TrieDrafter],
        accepted: Int32Array,
        offsets: Int32Array,
        feedback: StepFeedback | None = None,
    ) -> None:
        """See `BatchStrategy`. The feedback is not needed."""
        addresses, done = addresses_of([drafter.struct for drafter in drafters]), 0
        memory, workspace = self.memory.struct.address, _workspaces.address(1)
        while True:
            done = learn_all(addresses, done, accepted, offsets, memory, workspace, self.options.branch_length)
            if done == len(drafters):
                return
            drafter, written = drafters[done], accepted[offsets[done] : offsets[done + 1]]
            if drafter.struct is None:
                drafter.keep(written)
                done += 1
            else:
                drafter.reserve(written.shape[0])
                self.memory.reserve(written.shape[0] + 1, 2)


class TrieDrafter:
    """One live sequence: its own index, and its latest draft. It is written into the tenant's memory as it grows, if it
    `learns`.

    The prompt is written into its index piece by piece (`index_prompt`), and then what the sequence wrote meanwhile.
    Nothing can be drafted before.

    Attributes:
        remembered: the memory learns what it writes.
        struct: its arrays; None until the index holds the prompt and all that was written.
    """

    def __init__(self, strategy: TrieStrategy, prompt: Int32Array, learns: bool = True) -> None:
        self._strategy = strategy
        # What it learns without `learns` is forgotten with it.
        self._weights = strategy.learned if learns else Struct(Weights(*(table.copy() for table in strategy.weights)))
        self._memory_writer = strategy.memory.writer(marked=True)
        self._to_learn = prompt if learns and strategy.options.learn != "outputs" else _NOTHING
        written = {"outputs": 0, "prompts": _EVERYTHING, "both": prompt.shape[0]}[strategy.options.learn]
        self.remembered = learns and strategy.options.learn != "prompts"
        self._state = np.array([(self._weights.address, self.remembered, NOWHERE, written, 0, 0)], STATE)
        self._prompt, self._position = prompt, 0
        self._kept: list[Int32Array] = []
        self._index: PhraseIndex | None = None
        self.struct: Struct[SequenceArrays] | None = None

    def index_prompt(self, max_tokens: int) -> int:
        """See `PromptIndexer`. The memory comes first if it learns prompts."""
        learned = self._learn_prompt(max_tokens)
        return learned + (self._index_prompt(max_tokens - learned) if learned < max_tokens else 0)

    def _learn_prompt(self, max_tokens: int) -> int:
        piece, self._to_learn = self._to_learn[:max_tokens], self._to_learn[max_tokens:]
        if piece.shape[0]:
            self._strategy.memory.append(self._memory_writer, piece)
        return int(piece.shape[0])

    def _index_prompt(self, max_tokens: int) -> int:
        if self.struct is not None:
            return 0
        if self._index is None:
            self._index = PhraseIndex(_OWN_CAPACITY, self._prompt.shape[0] + _EXPECTED)
            self._writer = self._index.writer(marked=False)
        piece = self._prompt[self._position : self._position + max_tokens]
        self._index.append(self._writer, piece)
        self._position += piece.shape[0]
        if piece.shape[0] < max_tokens:
            self._state["prompt_end"] = self._writer["at"] + 1
            for written in self._kept:
                self._index.append(self._writer, written)
            self._prompt, self._kept = _NOTHING, []
            self.struct = Struct(
                SequenceArrays(
                    text=self._index.arrays,
                    writer=self._writer,
                    memory_writer=self._memory_writer,
                    state=self._state,
                    followed=np.array([NOWHERE, NOWHERE], np.int64),
                    roots=np.empty(MOST_ROOTS, CANDIDATE),
                    draft=empty_draft(0),
                )
            )
        return int(piece.shape[0])

    def keep(self, written: Int32Array) -> None:
        """Takes what was written before the prompt was indexed."""
        self._learn_prompt(_EVERYTHING)  # comes before the answer in the memory
        if self.remembered:
            self._strategy.memory.append(self._memory_writer, written)
        self._kept.append(written)
        self._state["written"] += written.shape[0]

    def reserve(self, tokens: int) -> None:
        """Makes space in its own index, which holds the prompt, for so many more tokens."""
        assert self._index is not None
        assert self.struct is not None
        self._index.reserve(tokens)
        self.struct.set(self.struct.fields._replace(text=self._index.arrays))

    def reserve_nodes(self, nodes: int) -> None:
        """Makes space for drafts of so many nodes; if there was less, the latest draft is lost."""
        if self.struct is None:
            self.index_prompt(_EVERYTHING)
            assert self.struct is not None
        if self.struct.fields.draft.tokens.shape[0] < nodes:
            self.struct.set(self.struct.fields._replace(draft=empty_draft(max(nodes, _LEAST_NODES))))
            self._state["drafted"] = self._state["roots"] = 0

    def propose(self, budget: int) -> DraftTree:
        trees = self._strategy.propose_all([self], np.array([budget], np.int32))
        return DraftTree(trees.tokens, trees.parents, trees.scores)

    def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
        self._strategy.observe_all([self], accepted, np.array([0, accepted.shape[0]], np.int32))

    def close(self) -> None:
        """The memory keeps what was learned."""
