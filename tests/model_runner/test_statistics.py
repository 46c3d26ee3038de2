"""Draft tokens by source, and statistics over several samples."""

from __future__ import annotations

from draftwood_model_runner.sequence import FORMAT_SOURCE, SequenceStats
from draftwood_strategies.base import SourceCounts


def test_draft_tokens_count_for_the_strategy_its_parts_and_the_grammar() -> None:
    assert SequenceStats().sources("trie") == {}
    plain = SequenceStats(proposed_tokens=9, draft_tokens=8, accepted_tokens=3)
    assert plain.sources("trie") == {"trie": SourceCounts(8, 3)}
    parts = {"trie": SourceCounts(4, 2), "recycling": SourceCounts(2, 0)}
    mixed = SequenceStats(proposed_tokens=9, draft_tokens=8, accepted_tokens=3, by_source=parts)
    assert mixed.sources("hybrid") == {**parts, FORMAT_SOURCE: SourceCounts(2, 1)}


def test_what_a_grammar_forces_is_not_the_strategy_s() -> None:
    """The drafter was never asked, as in short answers or while prompts wait."""
    forced = SequenceStats(proposed_tokens=0, draft_tokens=5, accepted_tokens=5)
    assert forced.sources("hybrid") == {FORMAT_SOURCE: SourceCounts(5, 5)}


def test_samples_add_up() -> None:
    first = SequenceStats(arrived_at=1.0, first_token_at=3.0, finished_at=5.0, decode_steps=2, accepted_by_depth=[2, 1])
    second = SequenceStats(arrived_at=1.0, first_token_at=2.0, finished_at=9.0, decode_steps=3, accepted_by_depth=[1])
    both = SequenceStats.over([first, second])
    assert (both.arrived_at, both.first_token_at, both.finished_at) == (1.0, 2.0, 9.0)
    assert (both.decode_steps, both.accepted_by_depth) == (5, [3, 1])
