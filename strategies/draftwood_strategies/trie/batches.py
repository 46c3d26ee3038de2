"""What one compiled call does for all sequences of a step that the trie strategy drafts for."""

from __future__ import annotations

from draftwood_strategies.native import Float32Array, Int32Array, Int64Array, Integer, compiled
from draftwood_strategies.structs import arrays_at
from draftwood_strategies.trie.arrays import SequenceArrays, Workspace
from draftwood_strategies.trie.expansion import expand
from draftwood_strategies.trie.learned.learning import Votes, learn
from draftwood_strategies.trie.learned.weights import Weights
from draftwood_strategies.trie.phrase_index import IndexArrays, append, lacks_space


@compiled
def draft_all(
    sequences: Int64Array,
    budgets: Int32Array,
    memory_address: Integer,
    workspace_address: Integer,
    branch_length: int,
    novel_nodes: int,
    tokens: Int32Array,
    parents: Int32Array,
    scores: Float32Array,
    offsets: Int32Array,
) -> None:
    """Writes a draft for each sequence.

    Args:
        sequences: int64[s], the addresses of their `SequenceArrays`, which have space for their budgets.
        budgets: int32[s], the most nodes of each draft.
        memory_address, workspace_address: of `IndexArrays` and `Workspace`.
        branch_length, novel_nodes: as in `expand`.
        tokens, parents, scores, offsets: as in `DraftTrees`, with space for all budgets.
    """
    memory, workspace = arrays_at(IndexArrays, memory_address), arrays_at(Workspace, workspace_address)
    end = 0
    for s in range(sequences.shape[0]):
        one = arrays_at(SequenceArrays, sequences[s])
        weights, draft = arrays_at(Weights, one.state[0].weights), one.draft
        n = expand(one, memory, weights, workspace, branch_length, novel_nodes, budgets[s])
        for node in range(n):
            tokens[end + node], parents[end + node] = draft.tokens[node], draft.parents[node]
            scores[end + node] = draft.scores[node]
        end += n
        offsets[s + 1] = end


@compiled
def learn_all(
    sequences: Int64Array,
    first: int,
    accepted: Int32Array,
    offsets: Int32Array,
    memory_address: Integer,
    workspace_address: Integer,
    branch_length: int,
) -> int:
    """For each sequence from `first` on, learns from its latest draft, and writes what it wrote into its own index and
    the memory.

    Args:
        sequences: as in `draft_all`; 0 for a sequence that has none yet.
        accepted, offsets: as in `BatchStrategy.observe_all`.
        memory_address, workspace_address: as in `draft_all`.

    Returns:
        The sequence that has no arrays, or for which an index must grow first; s after the last one.
    """
    memory, workspace = arrays_at(IndexArrays, memory_address), arrays_at(Workspace, workspace_address)
    votes = Votes(workspace.trust, workspace.chain, workspace.table)
    for s in range(first, sequences.shape[0]):
        if sequences[s] == 0:
            return s
        one = arrays_at(SequenceArrays, sequences[s])
        state, written = one.state[0], accepted[offsets[s] : offsets[s + 1]]
        n = written.shape[0]
        if lacks_space(one.own, n, 1) or (state.remembered and lacks_space(memory, n + 1, 2)):
            return s
        learn(one, memory, arrays_at(Weights, state.weights), written, branch_length, votes)
        append(one.own, one.writer[0], written)
        if state.remembered:
            append(memory, one.memory_writer[0], written)
        state.drafted = state.roots = 0
        state.written += n
    return int(sequences.shape[0])
