"""What one compiled call does for all sequences of a step that the trie strategy drafts for."""

from __future__ import annotations

from draftwood_strategies.native import Float32Array, Int32Array, Int64Array, Integer, compiled
from draftwood_strategies.structs import arrays_at
from draftwood_strategies.trie.expansion import expand
from draftwood_strategies.trie.learning import Votes, learn
from draftwood_strategies.trie.phrase_index import IndexArrays, append, lacks_space
from draftwood_strategies.trie.sequence import SequenceArrays
from draftwood_strategies.trie.weights import Weights
from draftwood_strategies.trie.workspace import Workspace


@compiled
def draft_all(
    sequences: Int64Array,
    budgets: Int32Array,
    memory_address: Integer,
    weights_address: Integer,
    workspace_address: Integer,
    branch_length: int,
    tokens: Int32Array,
    parents: Int32Array,
    scores: Float32Array,
    begins: Int32Array,
) -> None:
    """Writes a draft for each sequence.

    Args:
        sequences: int64[s], the addresses of their `SequenceArrays`, which have space for their budgets.
        budgets: int32[s], the most nodes of each draft.
        memory_address, weights_address, workspace_address: of `IndexArrays`, `Weights` and `Workspace`.
        tokens, parents, scores, begins: as in `DraftTrees`, with space for all budgets.
    """
    memory, weights = arrays_at(IndexArrays, memory_address), arrays_at(Weights, weights_address)
    workspace = arrays_at(Workspace, workspace_address)
    end = 0
    for s in range(sequences.shape[0]):
        one = arrays_at(SequenceArrays, sequences[s])
        n, draft = expand(one, memory, weights, workspace, branch_length, budgets[s]), one.draft
        for node in range(n):
            tokens[end + node], parents[end + node] = draft.tokens[node], draft.parents[node]
            scores[end + node] = draft.scores[node]
        end += n
        begins[s + 1] = end


@compiled
def next_without_space(sequences: Int64Array, begins: Int32Array, first: int) -> int:
    """The next sequence, from `first` on, whose own index must grow before it takes what was written; -1 for none."""
    for s in range(first, sequences.shape[0]):
        if lacks_space(arrays_at(SequenceArrays, sequences[s]).own, begins[s + 1] - begins[s]):
            return s
    return -1


@compiled
def learn_all(
    sequences: Int64Array,
    accepted: Int32Array,
    begins: Int32Array,
    memory_address: Integer,
    weights_address: Integer,
    workspace_address: Integer,
    remember: bool,
    start: Int32Array,
    branch_length: int,
) -> None:
    """For each sequence, learns from its latest draft, and writes what it wrote into its own index and the memory.

    Args:
        sequences, memory_address, weights_address, workspace_address: as in `draft_all`; the indexes have space.
        accepted, begins: as in `BatchStrategy.observe_all`.
        remember: write into the memory.
        start: int32[1], the start mark, which comes before the first token of a sequence in the memory.
    """
    memory, weights = arrays_at(IndexArrays, memory_address), arrays_at(Weights, weights_address)
    workspace = arrays_at(Workspace, workspace_address)
    votes = Votes(workspace.trust, workspace.chain, workspace.frontier)
    for s in range(sequences.shape[0]):
        one = arrays_at(SequenceArrays, sequences[s])
        state, written = one.state[0], accepted[begins[s] : begins[s + 1]]
        if remember and one.memory_writer[0].at < 0:
            append(memory, one.memory_writer[0], start)
        learn(one, memory, weights, written, branch_length, votes)
        append(one.own, one.writer[0], written)
        if remember:
            append(memory, one.memory_writer[0], written)
        state.drafted = state.roots = 0
        state.written += written.shape[0]
