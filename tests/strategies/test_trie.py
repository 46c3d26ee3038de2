"""The trie strategy, by what its sequences hold."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from draftwood_strategies import DraftTree, TrieStrategy, create
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.built_in import TrieOptions
from draftwood_strategies.trie.arrays import MOST_MEMORY, MOST_OWN, MOST_ROOTS, WIDEN_BY, WIDENED
from draftwood_strategies.trie.phrase_index import START, TOKENS_PER_BLOCK, PhraseIndex
from draftwood_strategies.trie.strategy import TrieDrafter
from draftwood_strategies.trie.weights import COUNTED, count_miss, no_novel, novel_chance
from tests.strategies.arrays import ids
from tests.strategies.test_draft import paths

SEQUENCES = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=60), min_size=1, max_size=6)


def best_path(tree: DraftTree) -> list[int]:
    """The tokens from the root along the best child each time."""
    path: list[int] = []
    node = -1
    while (children := np.flatnonzero(tree.parents == node)).size:
        node = int(children[np.argmax(tree.scores[children])])
        path.append(int(tree.tokens[node]))
    return path


def taught(strategy: TrieStrategy, sequences: list[list[int]]) -> TrieStrategy:
    for sequence in sequences:
        strategy.learn(np.array(sequence, np.int32))
    return strategy


def written(strategy: TrieStrategy, prompt: Int32Array, *outputs: Int32Array) -> TrieDrafter:
    """A live sequence that has written `outputs`, a step each."""
    drafter = strategy.start(prompt)
    for output in outputs:
        drafter.observe(output, None)
    return drafter


@given(SEQUENCES, st.lists(st.integers(0, 6), min_size=1, max_size=40), st.integers(1, 70), st.integers(1, 20))
def test_every_draft_is_valid_and_within_budget_and_branch_length(
    sequences: list[list[int]], prompt: list[int], budget: int, branch_length: int
) -> None:
    strategy = taught(TrieStrategy(branch_length=branch_length, capacity_tokens=128), sequences)
    drafter = strategy.start(np.array(prompt, np.int32))
    for step in (ids(1), ids(2, 3), ids(4, 4, 4)):
        tree = drafter.propose(budget)
        tree.check(vocab_size=7)
        assert len(tree) <= budget
        assert all(len(path) <= branch_length for path in paths(tree))
        drafter.observe(step, None)
    drafter.close()


@given(SEQUENCES, st.lists(st.integers(0, 6), min_size=1, max_size=40), st.integers(1, 70), st.integers(1, 6))
def test_a_score_depends_on_the_path_alone(
    sequences: list[list[int]], prompt: list[int], budget: int, branch_length: int
) -> None:
    """A draft that goes less deep has the same nodes with the same scores, and others in place of the deeper ones."""
    strategy = taught(TrieStrategy(), sequences)
    drafter = written(strategy, np.array(prompt, np.int32), ids(1), ids(2, 3), ids(4, 4, 4))
    deep = paths(drafter.propose(budget))
    strategy.options = TrieOptions(branch_length=branch_length)
    shallow = paths(drafter.propose(budget))
    least = min(shallow.values(), default=0.0)
    for path, score in deep.items():
        if len(path) <= branch_length and score > least:  # of equal ones either may be drafted
            assert shallow[path] == score


def test_the_candidates_at_the_root_are_those_of_the_searches_and_what_is_resumed() -> None:
    """In both indexes phrases of each order come more often than a search takes, the longest ones first."""
    context = [1, 2, 3, 4, 5, 6, 7, 8]
    text = [token for order in (8, 4, 2, 1) for token in [9, *context[-order:]] * 100]
    strategy = TrieStrategy()
    strategy.learn(np.array(text, np.int32))
    drafter = written(strategy, np.array(text, np.int32), ids(*context))
    drafter.propose(8)
    assert drafter.struct is not None
    assert drafter.struct.fields.state["roots"][0] == MOST_OWN + MOST_MEMORY
    assert MOST_ROOTS + 2 * WIDEN_BY * sum(WIDENED) <= 254


def test_the_prompt_is_drafted_without_any_memory() -> None:
    prompt = np.arange(100, 140, dtype=np.int32)
    drafter = written(TrieStrategy(), prompt, prompt[10:12])
    assert best_path(drafter.propose(8)) == prompt[12:20].tolist()


@pytest.mark.parametrize(("learn", "outputs", "prompts"), [("outputs", 1, 0), ("prompts", 0, 1), ("both", 1, 1)])
def test_the_learn_option_decides_what_the_memory_learns(learn: Any, outputs: int, prompts: int) -> None:
    strategy = TrieStrategy(learn=learn)
    prompt, output = np.arange(100, 130, dtype=np.int32), np.arange(200, 220, dtype=np.int32)
    written(strategy, prompt, output).close()
    assert strategy.tokens == 20 * outputs + 30 * prompts
    assert bool(len(written(strategy, ids(1), output[:4]).propose(4))) == bool(outputs)
    assert bool(len(written(strategy, ids(1), prompt[:4]).propose(4))) == bool(prompts)


def test_output_is_learned_while_it_is_written_and_stays_after_close() -> None:
    strategy = TrieStrategy()
    text = np.arange(100, 120, dtype=np.int32)
    live = written(strategy, ids(1), text)
    other = written(strategy, ids(2), text[:3])
    assert best_path(other.propose(4)) == text[3:7].tolist()
    live.close()
    assert best_path(written(strategy, ids(2), text[:3]).propose(4)) == text[3:7].tolist()


@given(SEQUENCES, st.integers(0, 6), st.integers(1, 64))
def test_drafts_never_cross_from_one_sequence_into_another(sequences: list[list[int]], token: int, budget: int) -> None:
    strategy = TrieStrategy()
    coloured = [[token + 10 * i for token in sequence] for i, sequence in enumerate(sequences)]
    drafters = [strategy.start(ids(999)) for _ in coloured]
    for at in range(0, 60, 7):
        for drafter, sequence in zip(drafters, coloured, strict=True):
            if sequence[at : at + 7]:
                drafter.observe(np.array(sequence[at : at + 7], np.int32), None)
    for colour in range(len(coloured)):
        tree = written(strategy, ids(999), ids(token + 10 * colour)).propose(budget)
        for phrase in paths(tree):
            assert len({t // 10 for t in phrase}) == 1


def test_the_own_output_is_not_counted_twice() -> None:
    strategy = TrieStrategy()
    live = written(strategy, ids(1), ids(5, 6, 7, 8, 5, 6))
    alone = TrieStrategy(learn="prompts")
    reference = written(alone, ids(1), ids(5, 6, 7, 8, 5, 6))
    assert live.propose(8).scores.tolist() == reference.propose(8).scores.tolist()


@given(SEQUENCES)
def test_a_memory_can_be_rebuilt_from_its_sequences(sequences: list[list[int]]) -> None:
    strategy = taught(TrieStrategy(), sequences)
    assert [found.tolist() for found in strategy.sequences()] == sequences
    assert strategy.tokens == sum(map(len, sequences))
    rebuilt = taught(TrieStrategy(), [found.tolist() for found in strategy.sequences()])
    one, other = (written(memory, ids(3), ids(1, 2)).propose(32) for memory in (strategy, rebuilt))
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.scores.tolist() == other.scores.tolist()


@given(SEQUENCES, st.integers(64, 160))
def test_capacity_bounds_the_memory_and_the_oldest_leave_first(sequences: list[list[int]], capacity: int) -> None:
    strategy = taught(TrieStrategy(capacity_tokens=capacity), sequences)
    kept = [token for found in strategy.sequences() for token in found.tolist()]
    everything = [token for sequence in sequences for token in sequence]
    assert strategy.tokens == len(kept) <= capacity
    assert kept == everything[len(everything) - len(kept) :]


def test_a_memory_grows_with_what_it_holds() -> None:
    random = np.random.default_rng(1)
    strategy = TrieStrategy(capacity_tokens=1_000_000)
    empty = strategy.nbytes
    assert empty < 128 * 1024  # the weights, which do not grow, and little else
    for held in (10_000, 100_000):
        while strategy.tokens < held:
            strategy.learn(random.integers(0, 5000, 200).astype(np.int32))
        assert strategy.nbytes <= empty + 64 * strategy.tokens


@pytest.mark.parametrize("learn", ["outputs", "prompts", "both"])
def test_start_marks_are_never_drafted_or_returned(learn: Any) -> None:
    strategy = TrieStrategy(learn=learn)
    for _ in range(5):
        written(strategy, ids(1), ids(2, 3), ids(2)).close()
    tree = strategy.start(ids(1)).propose(64)
    assert START not in tree.tokens
    assert all(START not in sequence for sequence in strategy.sequences())


def test_scores_learn_which_source_is_right() -> None:
    """A memory that is always wrong loses weight against the prompt that is right."""
    strategy = taught(TrieStrategy(), [[1, 2, 3, 66, 67]] * 30)
    prompt = ids(1, 2, 3, 77, 78)
    before = written(strategy, prompt, ids(1, 2, 3)).propose(8)
    for _ in range(200):
        drafter = written(strategy, prompt, ids(1, 2, 3))
        drafter.propose(8)
        drafter.observe(ids(77), None)
    after = written(strategy, prompt, ids(1, 2, 3)).propose(8)
    score = {name: float(tree.scores[tree.tokens == 77][0]) for name, tree in (("before", before), ("after", after))}
    assert score["after"] > score["before"] + 0.02


def test_scores_learn_which_tokens_are_right() -> None:
    """After the same matches, a token that always comes true is more probable than one that never does."""
    strategy = TrieStrategy()
    rng = np.random.default_rng(0)
    odd, numbers = 0, rng.permutation(np.arange(1000, 2000)).tolist()
    for number in numbers[:300]:  # "5 6 7" is always followed by 8, "15 16 17" by a number that is new
        drafter = written(strategy, ids(1), ids(5, 6, 7))
        drafter.propose(8)
        drafter.observe(ids(8, 15, 16, 17), None)
        tree = drafter.propose(8)
        odd = int(tree.tokens[0]) if len(tree) else 0
        drafter.observe(ids(number), None)
    steady = written(strategy, ids(1), ids(5, 6, 7)).propose(8)
    chance = written(strategy, ids(1), ids(5, 6, 7), ids(8, 15, 16, 17)).propose(8)
    assert float(steady.scores[steady.tokens == 8][0]) > 0.95
    assert odd in numbers
    assert float(chance.scores[chance.parents == -1].sum()) < 0.1


def test_scores_add_up_to_what_is_accepted() -> None:
    """The sum of a draft's scores is the number of its tokens that come true, on average over many drafts."""
    rng = np.random.default_rng(1)
    strategy = TrieStrategy()
    expected = accepted = 0.0
    for step in range(600):
        drafter = written(strategy, ids(1), ids(2, 3, 4))
        tree = drafter.propose(2)
        text = [5] if rng.random() < 0.7 else [6]
        text += [7, 9] if rng.random() < 0.5 else [8, 9]
        if step >= 300:
            expected += float(tree.scores.sum())
            accepted += max(len(path) for path in paths(tree).keys() | {()} if [*path] == text[: len(path)])
        drafter.observe(ids(*text), None)
    assert expected == pytest.approx(accepted, rel=0.1)


def test_the_prompt_weight_moves_trust_towards_the_prompt() -> None:
    scores = {}
    for weight in (0.1, 10.0):
        strategy = TrieStrategy(prompt_weight=weight)
        strategy.learn(ids(1, 2, 3, 66))
        tree = written(strategy, ids(1, 2, 3, 77), ids(1, 2, 3)).propose(8)
        scores[weight] = float(tree.scores[tree.tokens == 77][0])
    assert scores[10.0] > scores[0.1]


def test_a_draft_larger_than_all_before_it_gets_a_larger_workspace() -> None:
    strategy = TrieStrategy(branch_length=256)
    text = np.arange(100, 700, dtype=np.int32)
    strategy.learn(text)
    drafter = written(strategy, ids(1), text[:4])
    for budget in (3, 1000):
        tree = drafter.propose(budget)
        assert best_path(tree) == text[4 : 4 + min(budget, 256)].tolist()


@given(st.lists(st.integers(0, 30), max_size=80))
def test_counts_are_those_of_a_dictionary_whose_counts_decay(tokens: list[int]) -> None:
    novel = no_novel()
    expected = defaultdict[int, float](float)
    for token in tokens:
        count_miss(novel, token)
        for known in expected:
            expected[known] *= 0.999
        expected[token] += 1.0
    ranked, used = novel[:COUNTED], len(expected)
    found = dict(zip(ranked["token"][:used].tolist(), ranked["count"][:used].tolist(), strict=True))
    assert found == pytest.approx(dict(expected), rel=1e-4)
    assert (np.diff(ranked["count"]) <= 0).all()
    assert novel["count"][COUNTED] == pytest.approx(sum(expected.values()), rel=1e-4)
    assert sum(novel_chance(novel, rank) for rank in range(COUNTED)) < 1.0


def test_a_new_token_takes_the_place_of_the_least_frequent_one() -> None:
    novel = no_novel()
    for token in (5, 5, *range(100, 99 + COUNTED)):
        count_miss(novel, token)
    assert (novel["count"][:COUNTED] > 0).all()
    count_miss(novel, 6)
    assert {5, 6} <= set(novel["token"][:COUNTED].tolist())
    assert novel["count"][COUNTED] == pytest.approx(novel["count"][:COUNTED].sum(), rel=1e-4)


def test_tokens_that_no_context_predicts_are_drafted_after_an_unknown_context() -> None:
    """Three new words, then a comma, 7, again and again: no earlier context is like it."""
    strategy = TrieStrategy()
    drafter = strategy.start(ids(1))
    for word in range(100, 190, 3):
        drafter.propose(8)
        drafter.observe(ids(word, word + 1, word + 2), None)
        drafter.propose(8)
        drafter.observe(ids(7), None)
    tree = strategy.start(ids(997, 998, 999)).propose(8)
    first_level = tree.tokens[tree.parents == -1].tolist()
    assert first_level[0] == 7
    assert tree.scores[0] > 4 * tree.scores[tree.parents == -1][1]


def test_a_hybrid_with_a_successor_table_leaves_the_guessing_to_it() -> None:
    parts = [create("hybrid", sources=sources).parts["trie"] for sources in ("trie,recycling", "trie")]  # type: ignore[attr-defined]
    assert [part.backs_off for part in parts] == [False, True]


class PlainRing:
    """At most `blocks` blocks, the oldest first; each is a writer's name and up to `TOKENS_PER_BLOCK` of its tokens."""

    def __init__(self, blocks: int) -> None:
        self._blocks: deque[tuple[int, list[int]]] = deque(maxlen=blocks)

    def append(self, writer: int, tokens: list[int]) -> None:
        for token in tokens:
            own = [written for name, written in self._blocks if name == writer]
            if not own or len(own[-1]) == TOKENS_PER_BLOCK:
                own.append([])
                self._blocks.append((writer, own[-1]))
            own[-1].append(token)

    def sequences(self) -> list[list[int]]:
        names = dict.fromkeys(name for name, _ in self._blocks)
        return [[token for name, block in self._blocks if name == own for token in block] for own in names]


# The first writer's only block is the oldest of the full ring when it goes on: its new block is the old one.
@example(4, [(0, TOKENS_PER_BLOCK), (1, 3 * TOKENS_PER_BLOCK), (0, TOKENS_PER_BLOCK)])
@given(st.integers(4, 8), st.lists(st.tuples(st.integers(0, 4), st.integers(1, 70)), min_size=1, max_size=30))
def test_interleaved_writers_leave_what_a_plain_ring_of_blocks_holds(
    blocks: int, writes: list[tuple[int, int]]
) -> None:
    index, ring = PhraseIndex(blocks * TOKENS_PER_BLOCK), PlainRing(blocks)
    writers = [index.writer(marked=False) for _ in range(5)]
    written = 0
    for writer, count in writes:
        tokens = np.arange(written, written + count, dtype=np.int32)
        index.append(writers[writer], tokens)
        ring.append(writer, tokens.tolist())
        written += count
        found = [sequence.tolist() for sequence in index.sequences()]
        assert found == ring.sequences()
        assert index.tokens == sum(map(len, found))
        blocks_in_use = np.arange(len(index.arrays.blocks))
        for side in ("next", "previous"):
            assert not (index.arrays.blocks[side] == blocks_in_use).any(), "linked to itself"
