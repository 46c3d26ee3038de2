from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood_model_runner.errors import InvalidInputError
from draftwood_model_runner.output import TokenLogprobs
from draftwood_model_runner.request import SamplingParams, StopParams
from draftwood_model_runner.runners.base import StepBatch
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.sampling.token_sampler import TokenSampler
from draftwood_model_runner.sampling.verification import AcceptedPath, predicted_paths, verify, walk_row
from draftwood_strategies import EMPTY_TREE, DraftTree
from draftwood_strategies.arrays import Int32Array
from tests.model_runner.random_grammar import RandomGrammar
from tests.model_runner.sequences import make_sequence
from tests.strategies.test_draft import paths, trees

LAST = np.array([99], np.int32)
VOCAB = 100


def rooted_batch(tree: DraftTree) -> StepBatch:
    return lay_out([BatchRow(np.zeros(1, np.int32), 0, LAST, tree, logits_from=0)])


@given(trees(), st.lists(st.integers(0, 5), min_size=40, max_size=40))
def test_what_is_written_does_not_depend_on_the_tree(tree: DraftTree, truth: list[int]) -> None:
    """A model that writes `truth` writes a beginning of it, and the nodes on the way carry exactly that."""
    batch, depths = rooted_batch(tree), [0, *(len(path) for path in paths(tree))]
    predicted = np.array(truth, np.int32)[depths]
    feedback, logits = batch.feedback(predicted, None), np.eye(VOCAB, dtype=np.float32)[predicted]
    [followed] = predicted_paths(feedback, predicted)
    walked = walk_row(TokenSampler(make_sequence("a", LAST, StopParams(99)), frozenset(), VOCAB), feedback, logits, 0)
    assert (walked.token_ids, walked.nodes, walked.error) == (followed.token_ids, followed.nodes, None)
    assert walked.token_ids == truth[: len(walked.token_ids)]
    assert tree.tokens[walked.nodes].tolist() == walked.token_ids[:-1]
    assert tree.parents[walked.nodes].tolist() == [-1, *walked.nodes][:-1]


@pytest.mark.parametrize("top_tokens", [None, np.array([[7, 3], [5, 0], [6, 0]], np.int32)])
def test_a_forbidden_end_is_replaced_by_the_second_most_probable_token(top_tokens: Int32Array | None) -> None:
    """Of the same node: the most probable ones after other nodes, which follow in the arrays, say nothing of it. If the
    second ones are known, no logits are read."""
    batch = rooted_batch(DraftTree.of([3, 4]))
    logits = np.zeros((3, VOCAB), np.float32)
    logits[[0, 0, 1, 2], [7, 3, 5, 6]] = [2.0, 1.0, 2.0, 2.0]
    feedback = batch.feedback(logits.argmax(1).astype(np.int32), top_tokens)
    sampler = TokenSampler(make_sequence("a", LAST, StopParams(9, min_tokens=1)), frozenset({7}), VOCAB)
    [path] = verify([sampler], feedback, logits if top_tokens is None else np.full_like(logits, np.nan), [0], threads=1)
    assert (path.token_ids, path.nodes) == ([3, 5], [0])


class Failing(RandomGrammar):
    """Allows every token, and fails at the third one."""

    def __init__(self) -> None:
        super().__init__(VOCAB, share=1.0)

    def accept(self, token: int) -> None:
        super().accept(token)
        if len(self.written) == 3:
            raise InvalidInputError("format", None, "is too complex")


def sampler_of(grammar: RandomGrammar, ends: frozenset[int] = frozenset()) -> TokenSampler:
    sequence = make_sequence("a", LAST, StopParams(9), SamplingParams(logprobs=1), grammar=grammar)
    return TokenSampler(sequence, ends, VOCAB)


@pytest.mark.parametrize("ends", [frozenset[int](), frozenset({2})])
def test_an_error_comes_after_the_tokens_before_it_and_never_after_the_end(ends: frozenset[int]) -> None:
    """The model writes 1, 2, 3, 4, all of which are drafted. Beside a row whose prompt goes on."""
    rows = [
        BatchRow(np.zeros(1, np.int32), 0, np.zeros(7, np.int32), EMPTY_TREE, logits_from=6),
        BatchRow(np.zeros(1, np.int32), 0, LAST, DraftTree.of([1, 2, 3, 4], [-1, 0, 1, 2]), logits_from=0),
    ]
    batch = lay_out(rows)
    logits = np.eye(VOCAB, dtype=np.float32)[[0, 1, 2, 3, 4, 5]]
    feedback = batch.feedback(logits.argmax(1).astype(np.int32), None)
    assert feedback.parents.tolist() == [-1, -1, 0, 1, 2, 3]
    [path] = verify([None, sampler_of(Failing(), ends)], feedback, logits, [1], threads=1)
    assert (path.token_ids, path.nodes) == ([1, 2], [0, 1])
    assert [logprob.top_token_ids for logprob in path.logprobs] == [[1], [2]]
    assert (path.error is None) == bool(ends)


def test_rows_are_verified_in_the_order_asked_for_however_their_tokens_are_chosen() -> None:
    """Row i writes 10 + i, which is drafted, and 20 + i. A grammar chooses for rows 1 and 3; the prompt of row 2 goes
    on, and nobody asks for row 4."""
    batch = lay_out([BatchRow(np.zeros(1, np.int32), 0, LAST, DraftTree.of([10 + i]), logits_from=0) for i in range(5)])
    logits = np.eye(VOCAB, dtype=np.float32)[[token + i for i in range(5) for token in (10, 20)]]
    feedback = batch.feedback(logits.argmax(1).astype(np.int32), None)
    plain = TokenSampler(make_sequence("a", LAST, StopParams(9)), frozenset(), VOCAB)
    chooses = [sampler_of(RandomGrammar(VOCAB, share=1.0)) for _ in range(2)]
    found = verify([plain, chooses[0], None, chooses[1], plain], feedback, logits, [3, 1, 0], threads=1)
    assert [(path.token_ids, path.nodes) for path in found] == [([13, 23], [0]), ([11, 21], [0]), ([10, 20], [0])]


@pytest.mark.parametrize(("count", "nodes"), [(1, [0]), (2, [0, 2]), (3, [0, 2])])
def test_a_path_is_cut_behind_the_token_that_ends_the_output(count: int, nodes: list[int]) -> None:
    logprobs = [TokenLogprobs(-1.0, [token], [-1.0]) for token in (5, 6, 7)]
    path = AcceptedPath([5, 6, 7], [0, 2], logprobs, RuntimeError("behind the end")).cut(count)
    assert path.token_ids == [5, 6, 7][:count]
    assert (path.nodes, path.logprobs, path.error) == (nodes, logprobs[:count], None)


class Slow(RandomGrammar):
    """Allows every token; each mask takes long."""

    def __init__(self) -> None:
        super().__init__(VOCAB, share=1.0)
        self.slow = True


@pytest.mark.parametrize(("ends", "nodes"), [(frozenset[int](), []), (frozenset({1}), [0])])
def test_no_token_is_chosen_behind_a_slow_mask_in_the_same_step(ends: frozenset[int], nodes: list[int]) -> None:
    """The model writes 1, 2, both of which are drafted. With 1 the output may end, and there is no mask to come."""
    batch = rooted_batch(DraftTree.of([1, 2]))
    logits = np.eye(VOCAB, dtype=np.float32)[[1, 2, 3]]
    feedback = batch.feedback(logits.argmax(1).astype(np.int32), None)
    [path] = verify([sampler_of(Slow(), ends)], feedback, logits, [0], threads=1)
    assert (path.token_ids, path.nodes, path.error) == ([1], nodes, None)
