"""Trees of one size for the rows of an engine that verifies trees."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from draftwood_memory import Memory
from draftwood_memory.engines.drafts import EngineDrafts, Host
from draftwood_memory.engines.policy import SettingsPolicy
from draftwood_memory.engines.session import Row
from draftwood_memory.records import Int32Array
from draftwood_memory.settings import MemorySettings
from draftwood_sglang.corpus import FixedTrees, fixed_trees
from draftwood_strategies.draft import DraftTree, DraftTrees
from draftwood_strategies.draft_engine.engine import Verifies
from draftwood_strategies.draft_engine.step_times import LatestStepTime

RNG = np.random.default_rng(7)
TEXTS = RNG.integers(1, 900, (8, 400)).astype(np.int32)


@contextmanager
def tree_drafts(nodes: int, ended: dict[str, Int32Array] | None = None) -> Iterator[EngineDrafts]:
    ended = {} if ended is None else ended
    memory = Memory(None, "0123456789abcdef")
    settings = MemorySettings(strategy="trie")
    policy = SettingsPolicy(settings, "acme")
    host = Host(Verifies.FIXED_TREES, nodes - 1, lambda key: key not in ended, LatestStepTime, ended.get)
    made = EngineDrafts(memory, settings, policy, 1000, host)
    made.start()
    try:
        yield made
    finally:
        made.close()


def row(name: str, text: Int32Array, size: int, **options: object) -> Row:
    return Row(name, text[:size], 8, 1000, options)


def trees(drafts: EngineDrafts, nodes: int, *rows: Row) -> FixedTrees:
    return fixed_trees(np.array([given.tokens[-1] for given in rows], np.int64), nodes, drafts.step(rows))


def learned(drafts: EngineDrafts, *texts: Int32Array) -> None:
    drafts.memory.strategy("acme", "trie")
    for number, text in enumerate(texts):
        drafts.step([row(f"learned {number}", text, text.shape[0])])


def test_the_tree_of_a_known_text_has_its_continuation_and_exactly_so_many_nodes() -> None:
    with tree_drafts(16) as drafts:
        learned(drafts, TEXTS[0])
        trees(drafts, 16, row("1", TEXTS[0], 20))
        tokens, mask = trees(drafts, 16, row("1", TEXTS[0], 21))
        assert tokens.shape == (16,)
        assert mask.shape == (16 * 16,)
        assert tokens[0] == TEXTS[0][20]
        deepest = mask.reshape(16, 16)[mask.reshape(16, 16).sum(1).argmax()]
        path = tokens[deepest]
        assert path.shape[0] > 8
        assert path.tolist() == TEXTS[0][20 : 20 + path.shape[0]].tolist()


def test_a_request_without_drafts_has_a_tree_of_its_last_token() -> None:
    with tree_drafts(8) as drafts:
        learned(drafts, TEXTS[0])
        for options in ({"draftwood": "off"}, {"draftwood_max_nodes": 0}, {"draftwood_tenant": 7}):
            tokens, mask = trees(drafts, 8, row(str(options), TEXTS[0], 30, **options))
            assert tokens.tolist() == [TEXTS[0][29], 0, 0, 0, 0, 0, 0, 0]
            assert mask.reshape(8, 8).sum(1).tolist() == [1, 2, 2, 2, 2, 2, 2, 2]
        narrow = trees(drafts, 8, row("narrow", TEXTS[0], 30, draftwood_max_nodes=2))
        assert np.count_nonzero(narrow.tokens[1:]) == 2


def test_an_answer_is_learned_as_the_engine_ended_it() -> None:
    ended: dict[str, Int32Array] = {}
    with tree_drafts(8, ended) as drafts:
        strategy = drafts.memory.strategy("acme", "trie")
        trees(drafts, 8, row("cut", TEXTS[1], 40), row("longer", TEXTS[2], 40))
        cut, longer = drafts.sessions["cut"], drafts.sessions["longer"]
        ended.update({"cut": TEXTS[1][8:20], "longer": TEXTS[2][8:60]})
        drafts.step([])
        assert np.concatenate(cut.output).tolist() == TEXTS[1][8:20].tolist()
        assert np.concatenate(longer.output).tolist() == TEXTS[2][8:60].tolist()
        assert strategy.tokens > 0  # type: ignore[attr-defined]
        tokens, _ = trees(drafts, 8, row("again", TEXTS[2], 52))
        assert TEXTS[2][52] in tokens  # which no step had shown


def test_accepted_tokens_are_counted() -> None:
    with tree_drafts(8) as drafts:
        learned(drafts, TEXTS[3])
        trees(drafts, 8, row("1", TEXTS[3], 20))
        trees(drafts, 8, row("1", TEXTS[3], 25))
        trees(drafts, 8, row("1", TEXTS[3], 26))
        stats = drafts.sessions["1"].stats
        assert (stats.accepted_tokens, stats.draft_tokens) == (4, 14)


@st.composite
def random_drafts(draw: st.DrawFn) -> tuple[int, list[DraftTree]]:
    nodes = draw(st.integers(2, 9))
    trees = []
    for size in draw(st.lists(st.integers(0, nodes - 1), max_size=5)):
        parents = [draw(st.integers(-1, i - 1)) for i in range(size)]
        trees.append(DraftTree.of(range(10, 10 + size), parents))
    return nodes, trees


@given(random_drafts())
def test_nodes_are_those_of_the_drafts_below_the_last_token(drawn: tuple[int, list[DraftTree]]) -> None:
    nodes, drafts = drawn
    tokens, mask = fixed_trees(np.arange(1000, 1000 + len(drafts)), nodes, DraftTrees.of(drafts))
    for row, tree in enumerate(drafts):
        unused = nodes - 1 - len(tree)
        assert tokens.reshape(-1, nodes)[row].tolist() == [1000 + row, *tree.tokens.tolist(), *[0] * unused]
        above = [-1, *(parent + 1 for parent in tree.parents.tolist())]
        above += [0] * (nodes - len(above))
        for node in range(nodes):
            path, at = set(), node
            while at >= 0:
                path.add(at)
                at = above[at]
            assert np.flatnonzero(mask.reshape(-1, nodes, nodes)[row, node]).tolist() == sorted(path)
