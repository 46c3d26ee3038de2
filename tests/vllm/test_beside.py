"""Our drafts beside those of a drafter, in a model runner that stands in for vLLM's second one; with vLLM's own runner
and drafters: `test_beside_engine`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftwood_vllm.device_drafts import Purge
from tests.vllm.test_speculator import LONGEST, PROMPT, ROWS, Ranks, Runner, config, groups, new, speculator

__all__ = ["groups", "speculator"]  # fixtures

VOCABULARY = 16
CYCLE = [5, 6, 7, 8, 9]


class Drafter:
    """In the place of vLLM's speculator: drafts the same tokens for each row.

    Attributes:
        draft: what it drafts.
        calls: keywords of its calls.
    """

    def __init__(self, logits: torch.Tensor | None = None) -> None:
        self.draft = [1, 2, 3, 4]
        self.draft_logits = logits
        self.draft_tokens = torch.zeros((ROWS, LONGEST), dtype=torch.int64)
        self.calls: list[dict[str, Any]] = []
        self.broken = False

    def propose(self, input_batch: Any, *given: Any, **options: Any) -> torch.Tensor:
        self.calls.append(options)
        if self.broken:
            raise ValueError("it is broken")
        if self.draft_logits is not None:  # some vocabularies are of fewer tokens
            self.draft_logits[input_batch.idx_mapping, :, :5] = 0.5
        self.draft_tokens[:] = torch.tensor(self.draft)
        return self.draft_tokens[: input_batch.num_reqs]


class Both(Runner):
    """A runner whose model goes round in `CYCLE`, with both."""

    temperatures = torch.zeros(ROWS)

    def __init__(self, config: Any, made: Any) -> None:
        super().__init__(config, made)
        self.propose = self.speculator.propose
        self.speculator = SimpleNamespace(propose=self._propose)
        self.ours: Any = self.propose.__self__

    def _propose(self, *given: Any, **options: Any) -> torch.Tensor:
        """As vLLM calls it: with all temperatures."""
        tokens: torch.Tensor = self.propose(*given[:9], self.temperatures, *given[10:], **options)
        return tokens


@pytest.fixture
def beside(speculator: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes our part for a drafter, with modules in the place of vLLM's."""
    monkeypatch.delitem(import_module("sys").modules, "draftwood_vllm.beside", raising=False)
    yield import_module("draftwood_vllm.beside")
    import_module("sys").modules.pop("draftwood_vllm.beside", None)


def loaded(beside: Any, drafter: Drafter) -> Both:
    runner = made(beside, drafter)
    assert runner.load_model() == "loaded"
    return runner


def made(beside: Any, drafter: Drafter) -> Both:
    def factory(config: Any, device: torch.device) -> Drafter:
        beside.Beside(config, device, drafter)
        return drafter

    both = config()
    both.parallel_config = SimpleNamespace(data_parallel_size=1)
    return Both(both, factory)


def close(runner: Both) -> None:
    if runner.ours._opened is not None:
        runner.ours._opened.close()


def test_each_row_takes_the_draft_that_promises_more(beside: Any) -> None:
    """A row whose text goes round takes ours, one with nothing to draft from takes theirs."""
    runner = loaded(beside, Drafter())
    assert runner.step([new("a"), new("b", [1])]).tolist() == [[6, 7, 8, 9], [1, 2, 3, 4]]
    close(runner)


@pytest.fixture
def certain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores with which three tokens of ours promise more than four of theirs."""
    monkeypatch.setattr("tests.vllm.fake_trie.SURVIVAL", 1.0)


@pytest.mark.usefixtures("certain")
def test_behind_the_end_of_ours_are_tokens_of_theirs(beside: Any) -> None:
    runner = loaded(beside, Drafter())
    assert runner.step([new("a", tokens=5)]).tolist() == [[6, 7, 8, 4]]
    close(runner)


def test_their_speculator_stays_the_runners_and_is_asked_in_each_step_as_before(beside: Any) -> None:
    drafter = Drafter()
    runner = loaded(beside, drafter)
    runner.step([new("a")])
    runner.step()
    assert drafter.calls == [{"mm_inputs": None}] * 2
    batch = SimpleNamespace(num_reqs=1, idx_mapping=torch.zeros(1, dtype=torch.int32))
    runner.propose(batch, *[None] * 9, dummy_run=True, skip_attn_for_dummy_run=True)
    assert drafter.calls[-1] == {"dummy_run": True, "skip_attn_for_dummy_run": True}
    close(runner)


def test_only_tokens_of_ours_count_as_drafted_by_us(beside: Any) -> None:
    runner = loaded(beside, Drafter())
    runner.step([new("a"), new("b", [1])])
    runner.step()
    runner.ours._opened.drafts.take_in()
    live = runner.ours._opened.drafts._live
    assert [live[name].session.stats.proposed_tokens for name in "ab"] == [8, 0]
    close(runner)


def taken_by_theirs(runner: Both, name: str, **options: Any) -> int:
    """How many of the first steps of a request are theirs."""
    runner.step([new(name, **options)])
    drafts = [runner.step().clone() for _ in range(12)]
    runner.step(finished=[name])
    return sum(one[0].tolist() == [1, 2, 3, 4] for one in drafts)


def test_what_is_learned_of_the_choice_is_the_tenants(beside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant whose text ours is right for gets ours from nearly the first step on, and others do not; a purged tenant
    begins anew."""
    monkeypatch.setattr("tests.vllm.fake_trie.SURVIVAL", 0.6)  # so little that theirs goes first
    runner = loaded(beside, Drafter())
    of_acme = [taken_by_theirs(runner, f"a{number}", draftwood_tenant="acme") for number in range(4)]
    assert of_acme[0] > 2
    assert of_acme[-1] <= 1
    assert taken_by_theirs(runner, "b", draftwood_tenant="other") == of_acme[0]
    assert [taken_by_theirs(runner, f"c{number}", draftwood_tenant="") for number in range(3)] == [of_acme[0]] * 3
    region = next(iter(runner.ours._drafts._slots))
    runner.ours._drafts.apply(Purge(region, []))
    assert taken_by_theirs(runner, "d", draftwood_tenant="acme") == of_acme[0]
    close(runner)


def test_there_are_as_many_tables_as_tenants_with_memories(beside: Any) -> None:
    """A tenant without one has a table for each request; one that has no requests makes room."""
    runner = loaded(beside, Drafter())
    drafts = runner.ours._drafts
    drafts._tenants = 2
    states = {name: drafts._slot_of(name) for name in ("a", "b")}
    assert sorted(states.values()) == [0, 1]
    drafts._choice.table[:] = 1
    drafts._live = {"1": SimpleNamespace(decision=SimpleNamespace(region="a"))}
    assert (drafts._slot_of("c"), drafts._choice.table[states["b"]].sum()) == (states["b"], 0)
    drafts._live["2"] = SimpleNamespace(decision=SimpleNamespace(region="c"))
    assert drafts._slot_of("d") is None
    assert drafts._choice.table[states["a"]].sum() > 0
    close(runner)


def test_a_failure_of_ours_leaves_theirs(beside: Any, caplog: pytest.LogCaptureFixture) -> None:
    runner = loaded(beside, Drafter())
    runner.step([new("a")])
    runner.ours._drafts._trie.propose_chains = None
    for _ in range(2):
        assert runner.step().tolist() == [[1, 2, 3, 4]]
    assert caplog.text.count("goes on without drafts of Draftwood") == 1


def test_a_failure_of_theirs_leaves_ours_and_one_of_both_the_request(
    beside: Any, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = Drafter()
    runner = loaded(beside, drafter)
    runner.step([new("a"), new("b", [1])])
    drafter.broken = True
    assert runner.step().tolist() == [[7, 8, 9, 5], [8, 8, 8, 8]]
    assert runner.step().tolist() == [[8, 9, 5, 6], [9, 9, 9, 9]]
    assert caplog.text.count("goes on without its own drafts") == 1
    assert len(drafter.calls) == 2  # it is not asked again
    runner.ours._drafts._trie.propose_chains = None
    assert runner.step().tolist() == [[8] * 4, [5] * 4]


def test_a_failure_of_theirs_is_vllms_where_other_ranks_would_wait(beside: Any) -> None:
    drafter = Drafter()
    runner = loaded(beside, drafter)
    runner.ours._config.parallel_config.data_parallel_size = 2
    drafter.broken = True
    with pytest.raises(ValueError, match="it is broken"):
        runner.step([new("a")])
    close(runner)


def test_our_part_is_left_free_of_the_cache(beside: Any) -> None:
    runner = loaded(beside, Drafter())
    assert runner.model_memory_usage > 0
    close(runner)


def test_without_our_memory_theirs_is_as_before(beside: Any, caplog: pytest.LogCaptureFixture) -> None:
    drafter = Drafter()
    runner = made(beside, drafter)
    runner.ours._config.model_config.get_vocab_size = None
    runner.load_model()
    assert runner.step([new("a")]).tolist() == [[1, 2, 3, 4]]
    assert caplog.text.count("goes on without drafts of Draftwood") == 1


@pytest.mark.usefixtures("certain")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_of_ours_are_verified_as_certain_where_theirs_are_drawn(beside: Any, dtype: torch.dtype) -> None:
    """By the logits that vLLM keeps, at any temperature; and these are restored."""
    logits = torch.full((ROWS, LONGEST, VOCABULARY), 0.5, dtype=dtype)
    runner = loaded(beside, Drafter(logits))
    runner.temperatures = torch.full((ROWS,), 0.7)
    assert runner.step([new("a", tokens=5), new("b", [1])]).tolist() == [[6, 7, 8, 4], [1, 2, 3, 4]]
    for temperature in (0.01, 1.0, 50.0):
        chances = (logits.float() / temperature).softmax(-1)
        assert [chances[0, place].tolist() for place in range(3)] == [
            [float(token == expected) for token in range(VOCABULARY)] for expected in (6, 7, 8)
        ]
        assert torch.allclose(chances[0, 3], chances[1, 0])
    untouched = torch.full_like(logits, 0.5)
    assert torch.equal(logits[1], untouched[1])
    runner.ours._switch_off("a failure elsewhere")
    index = runner.ours._one_hot._tokens.clone()
    runner.step()
    assert torch.equal(logits, untouched)
    assert torch.equal(runner.ours._one_hot._tokens, index)  # nothing is marked any more


@pytest.mark.usefixtures("certain")
def test_drafts_of_ours_are_in_the_vocabulary_that_probabilities_are_of(beside: Any) -> None:
    runner = loaded(beside, Drafter(torch.zeros((ROWS, LONGEST, 9))))
    assert runner.step([new("a")]).tolist() == [[6, 7, 8, 4]]
    close(runner)


def test_after_a_failure_of_theirs_all_tokens_are_certain(beside: Any) -> None:
    logits = torch.full((ROWS, LONGEST, VOCABULARY), 0.5)
    drafter = Drafter(logits)
    runner = loaded(beside, drafter)
    drafter.broken = True
    [tokens] = runner.step([new("b", [1])]).tolist()
    assert logits[0].argmax(-1).tolist() == tokens
    close(runner)


def test_ranks_choose_alike(beside: Any, groups: list[Any]) -> None:
    """Though one alone knows of tenants."""
    ranks = Ranks(lambda config, device: _of_rank(beside, config, device), groups)
    taken = 0
    for number in range(12):
        joins = [new(f"{number}", [*PROMPT, number], draftwood_tenant="ab"[number % 2])] if number % 3 == 0 else []
        gone = [f"{number - 6}"] if number % 3 == 0 and number >= 6 else []
        one, other = ranks.both(lambda runner, joins=joins, gone=gone: _stepped(runner, joins, gone))
        assert torch.equal(one, other)
        taken += int((one != torch.tensor([1, 2, 3, 4])).sum())
    assert taken > 10
    for runner in ranks.runners:
        ours = runner.speculator.propose.__self__
        if ours._opened is not None:
            ours._opened.close()


def _of_rank(beside: Any, config: Any, device: torch.device) -> Drafter:
    drafter = Drafter()
    config.parallel_config = SimpleNamespace(data_parallel_size=1)
    beside.Beside(config, device, drafter)
    propose = drafter.propose

    def with_temperatures(*given: Any, **options: Any) -> torch.Tensor:
        return propose(*given[:9], torch.zeros(ROWS), *given[10:], **options)

    with_temperatures.__self__ = propose.__self__  # type: ignore[attr-defined]
    drafter.propose = with_temperatures  # type: ignore[method-assign]
    return drafter


def _stepped(runner: Any, joins: list[Any], gone: list[str]) -> torch.Tensor:
    tokens: torch.Tensor = runner.step(joins, gone)
    return tokens.clone()
