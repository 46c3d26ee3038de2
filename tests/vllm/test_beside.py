"""Our drafts beside those of a drafter, in a model runner that stands in for vLLM's second one; with vLLM's own runner
and drafters: `test_second_engine`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftwood_vllm.device_drafts import Purge
from tests.vllm.test_speculator import LONGEST, ROWS, Load, Ranks, Runner, groups, load, new, speculator

__all__ = ["groups", "load", "speculator"]  # fixtures

VOCABULARY = 16


class Drafter:
    """In the place of vLLM's speculator: drafts the same tokens for each row.

    Attributes:
        calls: keywords of its calls.
        broken: it raises.
    """

    def __init__(self, logits: torch.Tensor | None = None) -> None:
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
        self.draft_tokens[:] = torch.tensor([1, 2, 3, 4])
        return self.draft_tokens[: input_batch.num_reqs]


@pytest.fixture
def beside(speculator: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, with others in the place of vLLM's."""
    monkeypatch.delitem(sys.modules, "draftwood_vllm.beside", raising=False)
    yield import_module("draftwood_vllm.beside")
    sys.modules.pop("draftwood_vllm.beside", None)


def both(beside: Any, drafter: Drafter) -> Any:
    """What makes a drafter with ours beside it."""

    def made(config: Any, device: torch.device) -> Drafter:
        beside.Beside(config, device, drafter)
        return drafter

    return made


@pytest.fixture
def drafter() -> Drafter:
    return Drafter()


@pytest.fixture
def runner(beside: Any, drafter: Drafter, load: Load) -> Runner:
    return load(both(beside, drafter))


@pytest.fixture
def certain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores with which three tokens of ours promise more than four of theirs."""
    monkeypatch.setattr("tests.vllm.fake_trie.SURVIVAL", 1.0)


def test_each_row_takes_the_draft_that_promises_more(runner: Runner) -> None:
    """A row whose text goes round takes ours, one with nothing to draft from takes theirs. Tokens of ours alone count
    as drafted by us. Our part is left free of the cache."""
    assert runner.model_memory_usage > 0
    assert runner.step([new("a"), new("b", [1])]).tolist() == [[6, 7, 8, 9], [1, 2, 3, 4]]
    runner.step()
    runner.memory.take_in()
    assert [runner.memory._live[name].session.stats.proposed_tokens for name in "ab"] == [8, 0]


def test_their_speculator_stays_the_runners_and_is_asked_in_each_step_as_before(
    drafter: Drafter, runner: Runner
) -> None:
    assert runner.speculator is drafter
    runner.step([new("a")])
    runner.step()
    assert drafter.calls == [{"mm_inputs": None}] * 2
    batch = SimpleNamespace(num_reqs=1, idx_mapping=torch.zeros(1, dtype=torch.int32))
    drafter.propose(batch, *[None] * 9, dummy_run=True, skip_attn_for_dummy_run=True)
    assert drafter.calls[-1] == {"dummy_run": True, "skip_attn_for_dummy_run": True}


def taken_by_theirs(runner: Runner, name: str, **options: Any) -> int:
    """How many of the first steps of a request are theirs."""
    runner.step([new(name, **options)])
    drafts = [runner.step().clone() for _ in range(12)]
    runner.step(finished=[name])
    return sum(one[0].tolist() == [1, 2, 3, 4] for one in drafts)


def test_what_is_learned_of_the_choice_is_the_tenants(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant whose text ours is right for gets ours from nearly the first step on, and others do not; a purged tenant
    begins anew."""
    monkeypatch.setattr("tests.vllm.fake_trie.SURVIVAL", 0.6)  # so little that theirs goes first
    of_acme = [taken_by_theirs(runner, f"a{number}", draftwood_tenant="acme") for number in range(4)]
    assert of_acme[0] > 2
    assert of_acme[-1] <= 1
    assert taken_by_theirs(runner, "b", draftwood_tenant="other") == of_acme[0]
    assert [taken_by_theirs(runner, f"c{number}", draftwood_tenant="") for number in range(3)] == [of_acme[0]] * 3
    runner.ours._drafts.apply(Purge(next(iter(runner.ours._drafts._slots)), []))
    assert taken_by_theirs(runner, "d", draftwood_tenant="acme") == of_acme[0]


def test_there_are_as_many_tables_as_tenants_with_memories(runner: Runner) -> None:
    """A tenant without one has a table for each request; one that has no requests makes room."""
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


@pytest.mark.parametrize("opens", [True, False], ids=["in a step", "before the first step"])
def test_a_failure_of_ours_leaves_theirs(
    opens: bool, beside: Any, drafter: Drafter, load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if not opens:
            patch.setattr("draftwood_vllm.device_support.load", None)
        runner = load(both(beside, drafter))
    runner.step([new("a")])
    if opens:
        runner.ours._drafts._trie.propose_chains = None
    for _ in range(2):
        assert runner.step().tolist() == [[1, 2, 3, 4]]
    assert caplog.text.count("goes on without drafts of Draftwood") == 1


def test_a_failure_of_theirs_leaves_ours_and_one_of_both_the_request(
    drafter: Drafter, runner: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    runner.step([new("a"), new("b", [1])])
    drafter.broken = True
    assert runner.step().tolist() == [[7, 8, 9, 5], [8, 8, 8, 8]]
    assert runner.step().tolist() == [[8, 9, 5, 6], [9, 9, 9, 9]]
    assert caplog.text.count("goes on without its own drafts") == 1
    assert len(drafter.calls) == 2  # it is not asked again
    runner.ours._drafts._trie.propose_chains = None
    assert runner.step().tolist() == [[8] * 4, [5] * 4]


def test_a_failure_of_theirs_is_vllms_where_other_ranks_would_wait(drafter: Drafter, runner: Runner) -> None:
    runner.ours._config.parallel_config.data_parallel_size = 2
    drafter.broken = True
    with pytest.raises(ValueError, match="it is broken"):
        runner.step([new("a")])


@pytest.mark.usefixtures("certain")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_of_ours_before_theirs_are_verified_as_certain_where_theirs_are_drawn(
    beside: Any, load: Load, dtype: torch.dtype
) -> None:
    """By the logits that vLLM keeps, at any temperature; and these are restored."""
    logits = torch.full((ROWS, LONGEST, VOCABULARY), 0.5, dtype=dtype)
    runner = load(both(beside, Drafter(logits)))
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
def test_drafts_of_ours_are_in_the_vocabulary_that_probabilities_are_of(beside: Any, load: Load) -> None:
    runner = load(both(beside, Drafter(torch.zeros((ROWS, LONGEST, 9)))))
    assert runner.step([new("a")]).tolist() == [[6, 7, 8, 4]]


def test_after_a_failure_of_theirs_all_tokens_are_certain(beside: Any, load: Load) -> None:
    logits = torch.full((ROWS, LONGEST, VOCABULARY), 0.5)
    drafter = Drafter(logits)
    runner = load(both(beside, drafter))
    drafter.broken = True
    [tokens] = runner.step([new("b", [1])]).tolist()
    assert logits[0].argmax(-1).tolist() == tokens


def test_ranks_choose_alike(beside: Any, groups: list[Any]) -> None:
    """Though one alone knows of tenants."""
    ranks = Ranks(lambda config, device: both(beside, Drafter())(config, device), groups)
    taken = sum(int((drafts != torch.tensor([1, 2, 3, 4])).sum()) for _, drafts in ranks.steps())
    assert taken > 10
    ranks.close()
