from __future__ import annotations

import threading

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
from draftwood_strategies.threads import LEAST_NUMBERS
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


@given(st.lists(trees(), min_size=1, max_size=4), st.data())
def test_trees_of_a_step_are_followed_as_if_each_were_alone(drafts: list[DraftTree], data: st.DataObject) -> None:
    rows = [BatchRow(np.zeros(1, np.int32), 0, LAST, tree, logits_from=0) for tree in drafts]
    batch = lay_out(rows)
    nodes = batch.tokens.shape[0]
    predicted = np.array(data.draw(st.lists(st.integers(0, 5), min_size=nodes, max_size=nodes)), np.int32)
    together = predicted_paths(batch.feedback(predicted, None), predicted)
    for i, (row, path) in enumerate(zip(rows, together, strict=True)):
        own = predicted[batch.cu_seqlens[i] : batch.cu_seqlens[i + 1]]
        [alone] = predicted_paths(lay_out([row]).feedback(own, None), own)
        assert (path.token_ids, path.nodes) == (alone.token_ids, alone.nodes)


@pytest.mark.parametrize("wanted", [0, 1, 20])
def test_log_probabilities_are_those_after_the_node_before_the_token(wanted: int) -> None:
    """For a row whose tokens are the predicted ones, behind another row: 1 and 2 are accepted, and 5 is not."""
    drafts = [DraftTree.of([9]), DraftTree.of([5, 1, 2], [-1, -1, 1])]
    batch = lay_out([BatchRow(np.zeros(1, np.int32), 0, LAST, tree, logits_from=0) for tree in drafts])
    logits = np.random.default_rng(0).normal(size=(6, VOCAB)).astype(np.float32)
    logits[[2, 4, 5], [1, 2, 3]] = 9.0
    logits += 90.0  # the exponentials of twice as much are beyond float32
    feedback = batch.feedback(logits.argmax(1).astype(np.int32), None)
    sampler = TokenSampler(make_sequence("a", LAST, StopParams(9), SamplingParams(logprobs=wanted)), frozenset(), VOCAB)
    [path] = verify([None, sampler], feedback, logits, [1], threads=1)
    assert (path.token_ids, path.nodes) == ([1, 2, 3], [1, 2])
    for one, node, token in zip(path.logprobs, [2, 4, 5], [1, 2, 3], strict=True):
        law = logits[node] - np.log(np.exp(logits[node].astype(np.float64)).sum())
        assert one.top_token_ids == np.argsort(-law)[:wanted].tolist()
        assert one.top_logprobs == pytest.approx(np.sort(law)[::-1][:wanted].tolist(), abs=1e-4)
        assert one.logprob == pytest.approx(law[token], abs=1e-4)


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


class Located(RandomGrammar):
    """Allows every token, and notes which thread writes."""

    thread = 0

    def accept(self, token: int) -> None:
        self.thread = threading.get_ident()


@pytest.mark.parametrize(
    ("vocab", "threads", "expected"),
    [(LEAST_NUMBERS // 2, 2, 2), (LEAST_NUMBERS // 2, 1, 1), (LEAST_NUMBERS // 2 - 1, 2, 1)],
)
def test_threads_share_the_rows_if_these_have_many_logits(vocab: int, threads: int, expected: int) -> None:
    grammars = [Located(vocab, share=1.0) for _ in range(2)]
    samplers = [
        TokenSampler(make_sequence("a", LAST, StopParams(9), grammar=one), frozenset(), vocab) for one in grammars
    ]
    batch = lay_out([BatchRow(np.zeros(1, np.int32), 0, LAST, EMPTY_TREE, logits_from=0)] * 2)
    feedback = batch.feedback(np.array([5, 6], np.int32), None)
    found = verify(samplers, feedback, np.zeros((2, vocab), np.float32), [0, 1], threads)
    assert [path.token_ids for path in found] == [[5], [6]]
    assert len({grammar.thread for grammar in grammars}) == expected


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
