"""The engine's life: endings, errors, limits, counts; every slot, KV page and drafter is freed whatever happens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import draftwood_strategies
from draftwood_model_runner import engine as engine_module
from draftwood_model_runner import execution
from draftwood_model_runner.engine import Engine, EngineConfig
from draftwood_model_runner.errors import EngineStoppedError, InvalidValueError, ModelError
from draftwood_model_runner.loading.model import LoadedModel
from draftwood_model_runner.output import Finish, FinishReason
from draftwood_model_runner.request import SamplingParams, StopParams
from draftwood_model_runner.sequence import FORMAT_SOURCE, Sequence, SequenceState, SequenceStats
from draftwood_strategies import DraftTree, Feedback, Strategy
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.base import SourceCounts
from draftwood_strategies.draft_engine.controller import DraftCostModel
from draftwood_strategies.draft_engine.engine import DraftEngine
from tests.model_runner.families import VOCAB, greedy, served, torch_factory
from tests.model_runner.random_grammar import RandomGrammar
from tests.model_runner.sequences import GREEDY, engine_of, finish_of, make_sequence, run
from tests.strategies.fakes import FakeStrategy

PROMPT = (3, 1, 4, 1, 5)
VAIN = DraftTree.of([7, 7])
"""Tokens that this model never writes."""


@pytest.fixture
def model() -> LoadedModel:
    return served("llama")


@pytest.fixture
def engine(model: LoadedModel) -> Iterator[Engine]:
    engine = engine_of(model, 16, max_running=2)
    yield engine
    engine.check()
    engine.close()
    engine.check()
    assert (engine.running, engine.waiting) == (0, 0)


def sequence(prompt: tuple[int, ...] = PROMPT, **options: object) -> Sequence:
    fields = {"stop": StopParams(12), "max_draft_nodes": 8, "strategy_name": "test", **options}
    return make_sequence("r", prompt, **fields)  # type: ignore[arg-type]


FAULTS: dict[str, dict[str, Any]] = {
    **{call: {"raises_in": call} for call in ("start", "propose", "observe", "close")},
    "malformed": {"tree": object()},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_strategys_error_stays_its_own(engine: Engine, fault: str) -> None:
    faulty = FakeStrategy(**FAULTS[fault])
    bad, good = sequence(strategy=faulty), sequence((9, 9, 9), strategy=draftwood_strategies.create("trie"))
    outputs = run(engine, bad, good)
    assert [o.finish.reason for o in outputs if o.finish] == [FinishReason.LENGTH] * 2
    assert bad.output == greedy("llama", PROMPT, 12)
    assert good.output == greedy("llama", (9, 9, 9), 12)
    assert bad.stats.drafting_disabled_reason
    assert good.stats.drafting_disabled_reason == ""
    assert faulty.closed == (0 if fault == "start" else 1)


@pytest.mark.parametrize("name", ["trie", "hybrid"])
@pytest.mark.parametrize("steps", [0, 4, 12])
@pytest.mark.parametrize(
    ("sampling", "grammar"),
    [
        (GREEDY, False),
        (SamplingParams(temperature=0.9, top_p=0.9, seed=7), False),
        (SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5), False),
        (GREEDY, True),
    ],
)
def test_a_sequence_drafts_by_the_strategy_that_it_gets_while_it_runs(
    engine: Engine, name: str, steps: int, sampling: SamplingParams, grammar: bool
) -> None:
    """As when its memory is loaded late: by what that has learned, and it learns the whole answer, once."""

    def asked(strategy: Strategy | None = None) -> Sequence:
        options: dict[str, Any] = {"strategy_name": name, "stop": StopParams(40), "sampling": sampling}
        return sequence(strategy=strategy, grammar=RandomGrammar(VOCAB) if grammar else None, **options)

    plain = asked()
    run(engine, plain)
    expected = plain.output
    assert (sampling is GREEDY and not grammar) == (expected == greedy("llama", PROMPT, 40))
    before, loaded, throughout = (draftwood_strategies.create(name) for _ in range(3))
    for strategy in (loaded, throughout):
        strategy.learn(np.array([*PROMPT, *expected], np.int32))  # type: ignore[attr-defined]
    run(engine, asked(throughout))
    late = asked(before)
    engine.add(late)
    while len(late.output) < steps:
        engine.step()
    late.strategy = loaded
    taken = late.stats.decode_steps
    run(engine)
    assert late.output == expected
    assert late.stats.decode_steps - taken < (40 - len(expected[:steps])) / 2
    assert sum(counts.verified for counts in late.stats.sources(name).values()) == late.stats.draft_tokens
    assert late.stats.drafting_disabled_reason == ""
    assert loaded.tokens == throughout.tokens  # type: ignore[attr-defined]


def test_an_error_in_the_model_ends_the_step_and_not_the_engine(
    engine: Engine, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = FakeStrategy()
    first, queued = sequence(strategy=strategy), [sequence(), sequence()]
    engine.add(first)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(torch_factory(model).module, "forward", lambda **_: 1 / 0)
        outputs = engine.step()
    assert [output.sequence for output in outputs] == [first]
    error = finish_of(outputs).error
    assert isinstance(error, ModelError)
    assert "division by zero" in str(error)
    assert strategy.closed == 1
    engine.check()
    run(engine, *queued)
    assert all(s.output == greedy("llama", PROMPT, 12) for s in queued)


@pytest.mark.parametrize("place", ["propose", "learn", "lay_out_step"])
def test_a_defect_of_drafting_costs_its_sequences_their_drafts_and_nothing_else(
    engine: Engine, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, later = (sequence(strategy=draftwood_strategies.create("trie")) for _ in range(2))
    engine.add(first)
    engine.step()
    owner = engine_module if place == "lay_out_step" else DraftEngine
    works, left = getattr(owner, place), 1

    def fails_once(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        return 1 / 0 if left == 0 else works(*arguments)

    monkeypatch.setattr(owner, place, fails_once)
    run(engine, later)
    assert left <= 0
    assert first.output == later.output == greedy("llama", PROMPT, 12)
    assert first.stats.drafting_disabled_reason == "drafting raised ZeroDivisionError: division by zero"
    third = sequence(strategy=draftwood_strategies.create("trie"))
    run(engine, third)
    assert third.stats.drafting_disabled_reason == ""


@pytest.mark.parametrize(("module", "name"), [(execution, "TokenSampler"), (engine_module, "lay_out_step")])
def test_what_cannot_be_begun_or_laid_out_ends_alone(
    engine: Engine, module: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = sequence(strategy=FakeStrategy()), sequence((9, 9, 9))
    with monkeypatch.context() as patch:
        patch.setattr(module, name, lambda *_: 1 / 0)
        finish = finish_of(run(engine, bad))
    assert finish.reason is FinishReason.ERROR
    assert "division by zero" in str(finish.error)
    run(engine, good)
    assert good.output == greedy("llama", (9, 9, 9), 12)


def test_cancel_frees_at_once_and_twice_is_once(engine: Engine) -> None:
    strategy = FakeStrategy()
    running, waiting = [sequence(strategy=strategy) for _ in range(2)], sequence(strategy=strategy)
    for s in [*running, waiting]:
        engine.add(s)
    engine.step()
    assert (engine.running, engine.waiting) == (2, 1)
    for s in [running[0], waiting, running[0], waiting]:
        engine.cancel(s)
        engine.check()
    assert (engine.running, engine.waiting) == (1, 0)
    assert strategy.closed == 1
    outputs = run(engine)
    assert {o.sequence for o in outputs} == {running[1]}
    assert running[1].output == greedy("llama", PROMPT, 12)


def test_close_ends_all_and_refuses_more(model: LoadedModel) -> None:
    engine = engine_of(model, 8, max_running=1)
    sequences = [sequence() for _ in range(3)]
    for s in sequences:
        engine.add(s)
    engine.step()
    engine.close()
    engine.check()
    assert all(s.state is SequenceState.FINISHED for s in sequences)
    assert engine.step() == []
    with pytest.raises(EngineStoppedError):
        engine.add(sequence())


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"prompt": (256,)}, "prompt"),
        ({"prompt": (-1,)}, "prompt"),
        ({"prompt": (1,) * 245}, "prompt"),
        ({"stop": StopParams(252)}, "prompt"),
        ({"max_draft_nodes": 17}, "drafting.max_nodes"),
        ({"max_draft_nodes": -1}, "drafting.max_nodes"),
    ],
)
def test_what_does_not_fit_is_refused(engine: Engine, options: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        engine.add(sequence(**options))  # type: ignore[arg-type]
    assert caught.value.field == field
    assert not engine.has_work


def test_the_whole_context_can_be_used(engine: Engine) -> None:
    s = sequence((1, 2), stop=StopParams(254), strategy=draftwood_strategies.create("trie"), max_draft_nodes=16)
    run(engine, s)
    assert s.output == greedy("llama", (1, 2), 254)


def test_stop_tokens_and_strings_end_inside_an_accepted_run() -> None:
    model = served("bundled")
    engine = engine_of(model, 32)
    prompt = model.tokenizer.encode_chat([{"role": "user", "content": "where is my order"}])
    expected = greedy("bundled", tuple(prompt.tolist()), 80)
    text = model.tokenizer.decode(expected)
    cut = text.index(" ", 40)
    stop_string = text[cut + 1 : cut + 9]
    strategy = draftwood_strategies.create("trie")

    def answer(stop: StopParams) -> tuple[Sequence, str, Finish]:
        s = make_sequence("r", prompt, stop, strategy=strategy, max_draft_nodes=32)
        outputs = run(engine, s)
        return s, "".join("".join(o.texts) for o in outputs), finish_of(outputs)

    for _ in range(2):  # the second time most of it is drafted
        s, written, ended = answer(StopParams(80))
        assert written == model.tokenizer.decode(s.output)
        s, written, ended = answer(StopParams(80, strings=("never there", stop_string)))
        assert written == text[: text.index(stop_string)]
        assert (ended.reason, ended.stop_string) == (FinishReason.STOP, stop_string)
        stop_token = expected[30]
        s, written, ended = answer(StopParams(80, token_ids=frozenset({stop_token})))
        assert s.output == expected[: expected.index(stop_token) + 1]
        assert ended.stop_token_id == stop_token
    assert s.stats.accepted_tokens > 5
    engine.check()


def test_statistics_add_up(engine: Engine) -> None:
    strategy = draftwood_strategies.create("trie")
    for _ in range(2):
        s = sequence(strategy=strategy)
        outputs = run(engine, s)
    drafted = sum(sum(o.drafted) for o in outputs)
    stats = s.stats
    assert stats.decode_steps == len(outputs)
    assert stats.accepted_tokens == drafted == sum(stats.accepted_by_depth) > 0
    assert s.mean_acceptance_length == pytest.approx(12 / len(outputs))
    assert stats.draft_tokens >= drafted
    assert 0 < stats.arrived_at <= stats.first_scheduled_at < stats.first_token_at <= stats.finished_at
    assert 0 < stats.draft_seconds < stats.step_seconds


class Right(FakeStrategy):
    """Drafts the next two tokens that the model writes."""

    def __init__(self, answer: list[int]) -> None:
        super().__init__(DraftTree.of(answer[:2]))
        self._answer = answer

    def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
        self._answer = self._answer[len(accepted) :]
        self.tree = DraftTree.of(self._answer[:2])


@pytest.mark.parametrize("pays", [False, True])
def test_a_prompt_that_waits_for_steps_to_end_meets_no_drafts(model: LoadedModel, pays: bool) -> None:
    """A sequence whose drafts pay skips three steps and makes up for it in the fourth; others go on writing."""
    engine = engine_of(model, 16, shared_prefill_chunk=4)
    answer = greedy("llama", PROMPT, 80)
    strategy = Right(answer) if pays else FakeStrategy(VAIN)
    decoding = sequence(strategy=strategy, stop=StopParams(80))
    engine.add(decoding)
    for _ in range(12):  # until it is known what drafts bring
        engine.step()
    prompt = sequence(tuple(range(10, 33)), stop=StopParams(1))
    engine.add(prompt)
    steps = []
    while not prompt.output:
        before, drafted = len(decoding.output), decoding.stats.draft_tokens
        engine.step()
        steps.append((len(decoding.output) - before, decoding.stats.draft_tokens - drafted))
    if pays:
        assert steps == [(0, 0), (0, 0), (0, 0), (3, 2), (0, 0), (3, 2)]
    else:
        assert steps == [(1, 0)] * 5 + [(1, 2)]
    run(engine)
    assert decoding.output == answer
    engine.close()


def test_kv_memory_that_the_device_lacks_is_refused_at_start(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mapped(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", mapped)
    with pytest.raises(InvalidValueError, match=r"kv_cache_tokens: 5000 is not allowed; the device has no memory"):
        Engine(model, EngineConfig(kv_cache_tokens=5000))


def test_a_tenants_cost_model_reaches_no_other_and_no_strategy_else(model: LoadedModel) -> None:
    """Vain drafts of one tenant are counted where its next sequences look, and nowhere else."""
    engine, vain = Engine(model, EngineConfig(max_draft_nodes=16)), FakeStrategy(VAIN)
    models: dict[str, list[DraftCostModel]] = {}
    expected = dict[str, list[float]]()
    for tenant, name in (("a", "x"), ("a", "x"), ("b", "x"), ("a", "y"), ("a", "x")):
        asked = sequence(strategy=vain, strategy_name=name, tenant=tenant, max_draft_nodes=4)
        engine.add(asked)
        engine.step()
        assert asked.drafting is not None
        assert asked.drafting.drafter is not None
        cost_model = asked.drafting.drafter.account.tenant
        models.setdefault(tenant + name, []).append(cost_model)
        expected.setdefault(tenant + name, []).append(cost_model.accepted)
        run(engine)
    assert len({id(cost_model) for of_key in models.values() for cost_model in of_key}) == len(models) == 3
    assert len({id(cost_model) for cost_model in models["ax"]}) == 1
    assert expected["ax"][0] == 1.0 > expected["ax"][1] > expected["ax"][2] > 0.0
    assert expected["bx"] == expected["ay"] == [1.0]


def test_outputs_have_the_verified_drafts_if_they_are_asked_for(engine: Engine) -> None:
    strategy = draftwood_strategies.create("trie")
    for _ in range(2):
        asking = sequence(strategy=strategy, stop=StopParams(40), draft_trees=True)
        outputs = run(engine, asking)
    trees = [output.tree for output in outputs if output.tree is not None]
    assert len(trees) == len(outputs)
    assert any(tree.accepted for tree in trees)
    for output, tree in zip(outputs, trees, strict=True):
        assert all(-1 <= parent < node for node, parent in enumerate(tree.parents))
        path = [-1, *tree.accepted]
        assert [tree.parents[node] for node in tree.accepted] == path[:-1]
        assert [tree.token_ids[node] for node in tree.accepted] == output.token_ids[: len(tree.accepted)]
        assert output.drafted.count(True) == len(tree.accepted)
    assert sum(len(tree.token_ids) for tree in trees) == asking.stats.draft_tokens
    assert all(output.tree is None for output in run(engine, sequence(strategy=strategy)))


def test_draft_tokens_count_for_the_strategy_its_parts_and_the_grammar() -> None:
    assert SequenceStats().sources("trie") == {}
    plain = SequenceStats(proposed_tokens=9, draft_tokens=8, accepted_tokens=3)
    assert plain.sources("trie") == {"trie": SourceCounts(8, 3)}
    parts = {"trie": SourceCounts(4, 2), "recycling": SourceCounts(2, 0)}
    mixed = SequenceStats(proposed_tokens=9, draft_tokens=8, accepted_tokens=3, by_source=parts)
    assert mixed.sources("hybrid") == {**parts, FORMAT_SOURCE: SourceCounts(2, 1)}
    never_asked = SequenceStats(proposed_tokens=0, draft_tokens=5, accepted_tokens=5)
    assert never_asked.sources("hybrid") == {FORMAT_SOURCE: SourceCounts(5, 5)}, "what a grammar forces"


def test_samples_add_up() -> None:
    first = SequenceStats(arrived_at=1.0, first_token_at=3.0, finished_at=5.0, decode_steps=2, accepted_by_depth=[2, 1])
    second = SequenceStats(arrived_at=1.0, first_token_at=2.0, finished_at=9.0, decode_steps=3, accepted_by_depth=[1])
    both = SequenceStats.over([first, second])
    assert (both.arrived_at, both.first_token_at, both.finished_at) == (1.0, 2.0, 9.0)
    assert (both.decode_steps, both.accepted_by_depth) == (5, [3, 1])


def test_a_sequence_that_lost_its_slot_drafts_only_at_the_end_of_what_it_wrote(model: LoadedModel) -> None:
    """It is recomputed in chunks of one token, each of which looks like a step that writes."""
    engine = engine_of(model, 16, max_running=2, prefill_chunk=2, shared_prefill_chunk=2, prefix_cache=False)
    answer = greedy("llama", PROMPT, 60)
    again, prompt = sequence(strategy=Right(answer), stop=StopParams(60)), sequence((9,) * 30, tenant="b")
    engine.add(again)
    while len(again.output) < 20:
        engine.step()
    engine.pause(again)
    engine.resume(again)
    engine.add(prompt)
    recomputed = 0
    while again.length - again.committed > 1:
        drafted, written = again.stats.draft_tokens, len(again.output)
        engine.step()
        if len(again.output) == written:
            recomputed += 1
            assert again.stats.draft_tokens == drafted
    assert recomputed > 20
    run(engine)
    assert again.output == answer
    engine.close()


def test_the_configuration_names_what_is_wrong() -> None:
    counts = "max_running", "prefill_chunk", "shared_prefill_chunk", "kv_cache_tokens", "threads", "max_draft_nodes"
    for field in counts:
        with pytest.raises(InvalidValueError, match=field):
            EngineConfig(**{field: -1})  # type: ignore[arg-type]
    for weight in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(InvalidValueError, match="tenant_weights"):
            EngineConfig(tenant_weights={"acme": weight})
