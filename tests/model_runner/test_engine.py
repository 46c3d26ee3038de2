"""The engine's life: endings, errors, limits; every slot, KV page and drafter is freed whatever happens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

import draftwood_strategies
from draftwood_model_runner.engine import Engine, EngineConfig
from draftwood_model_runner.errors import EngineStoppedError, InvalidValueError, ModelError
from draftwood_model_runner.loading.model import LoadedModel
from draftwood_model_runner.output import FinishReason, StepOutput
from draftwood_model_runner.request import StopParams
from draftwood_model_runner.sequence import Sequence, SequenceState
from draftwood_strategies import DraftTree, Feedback
from draftwood_strategies.budgeting.draft_account import DraftCostModel
from draftwood_strategies.budgeting.guarded_drafter import GuardedDrafter
from draftwood_strategies.budgeting.watchdog import Watchdog
from draftwood_strategies.draft import Int32Array
from tests.model_runner.families import as_prompt, greedy, served, torch_factory
from tests.model_runner.sequences import make_sequence

PROMPT = (3, 1, 4, 1, 5)


@pytest.fixture
def model() -> LoadedModel:
    torch.set_num_threads(1)
    return served("llama")


@pytest.fixture
def engine(model: LoadedModel) -> Iterator[Engine]:
    engine = Engine(model, EngineConfig(max_running=2, max_draft_nodes=16, adaptive_budget=False))
    yield engine
    engine.check()
    engine.close()
    engine.check()
    assert (engine.running, engine.waiting) == (0, 0)


def sequence(prompt: tuple[int, ...] = PROMPT, **options: object) -> Sequence:
    fields = {"stop": StopParams(12), "max_draft_nodes": 8, "strategy_name": "test", **options}
    return make_sequence("r", as_prompt(prompt), **fields)  # type: ignore[arg-type]


def run(engine: Engine) -> list[StepOutput]:
    outputs = []
    for _ in range(1000):
        if not engine.has_work:
            break
        outputs += engine.step()
        engine.check()
    assert not engine.has_work
    return outputs


class Faulty:
    """A strategy, and its own drafter, that misbehaves in the call named."""

    top_k = 0

    def __init__(self, call: str) -> None:
        self.call = call
        self.closed = 0

    def _maybe_raise(self, call: str) -> None:
        if call == self.call:
            raise RuntimeError("no luck today")

    def start(self, prompt: Int32Array) -> Faulty:
        self._maybe_raise("start")
        return self

    def propose(self, budget: int) -> DraftTree:
        self._maybe_raise("propose")
        chain = [7] * (budget + 1 if self.call == "too many" else 2)
        if self.call == "vocabulary":
            chain = [10**6]
        if self.call == "not a tree":
            return None  # type: ignore[return-value]
        if self.call == "laws":
            return DraftTree(np.array([1, 2], np.int32), np.array([1, 0], np.int32), np.ones(2, np.float32))
        return DraftTree.of(chain)

    def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
        self._maybe_raise("observe")

    def close(self) -> None:
        self.closed += 1
        self._maybe_raise("close")


@pytest.mark.parametrize(
    "call", ["start", "propose", "observe", "close", "too many", "vocabulary", "not a tree", "laws"]
)
def test_a_strategys_error_stays_its_own(engine: Engine, call: str) -> None:
    faulty = Faulty(call)
    bad, good = sequence(strategy=faulty), sequence((9, 9, 9), strategy=draftwood_strategies.create("trie"))
    engine.add(bad)
    engine.add(good)
    outputs = run(engine)
    assert [o.finish.reason for o in outputs if o.finish] == [FinishReason.LENGTH] * 2
    assert bad.output == greedy("llama", PROMPT, 12)
    assert good.output == greedy("llama", (9, 9, 9), 12)
    assert bad.stats.drafting_disabled_reason
    assert good.stats.drafting_disabled_reason == ""
    assert faulty.closed == (0 if call == "start" else 1)


def test_an_error_in_the_model_ends_the_step_and_not_the_engine(
    engine: Engine, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = Faulty("never")
    first, queued = sequence(strategy=faulty), [sequence(), sequence()]
    engine.add(first)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(torch_factory(model).module, "forward", lambda **_: 1 / 0)
        [output] = engine.step()
    assert output.sequence is first
    assert output.finish is not None
    assert output.finish.reason is FinishReason.ERROR
    assert isinstance(output.finish.error, ModelError)
    assert "division by zero" in str(output.finish.error)
    assert faulty.closed == 1
    engine.check()
    for later in queued:
        engine.add(later)
    run(engine)
    assert all(s.output == greedy("llama", PROMPT, 12) for s in queued)


def test_cancel_frees_at_once_and_twice_is_once(engine: Engine) -> None:
    faulty = Faulty("never")
    running, waiting = [sequence(strategy=faulty) for _ in range(2)], sequence(strategy=faulty)
    for s in [*running, waiting]:
        engine.add(s)
    engine.step()
    assert (engine.running, engine.waiting) == (2, 1)
    for s in [running[0], waiting, running[0], waiting]:
        engine.cancel(s)
        engine.check()
    assert (engine.running, engine.waiting) == (1, 0)
    assert faulty.closed == 1
    outputs = run(engine)
    assert {o.sequence for o in outputs} == {running[1]}
    assert running[1].output == greedy("llama", PROMPT, 12)


def test_close_ends_all_and_refuses_more(model: LoadedModel) -> None:
    engine = Engine(model, EngineConfig(max_running=1, adaptive_budget=False))
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
        ({"max_draft_nodes": 17}, "max_draft_nodes"),
        ({"max_draft_nodes": -1}, "max_draft_nodes"),
    ],
)
def test_what_does_not_fit_is_refused(engine: Engine, options: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        engine.add(sequence(**options))  # type: ignore[arg-type]
    assert caught.value.field == field
    assert not engine.has_work


def test_the_whole_context_can_be_used(engine: Engine) -> None:
    s = sequence((1, 2), stop=StopParams(254), strategy=draftwood_strategies.create("trie"), max_draft_nodes=16)
    engine.add(s)
    run(engine)
    assert s.output == greedy("llama", (1, 2), 254)


def test_stop_tokens_and_strings_end_inside_an_accepted_run(model: LoadedModel) -> None:
    model = served("bundled")
    engine = Engine(model, EngineConfig(max_draft_nodes=32, adaptive_budget=False))
    prompt = model.tokenizer.encode_chat([{"role": "user", "content": "where is my order"}])
    expected = greedy("bundled", tuple(prompt.tolist()), 80)
    text = model.tokenizer.decode(expected)
    cut = text.index(" ", 40)
    stop_string = text[cut + 1 : cut + 9]
    strategy = draftwood_strategies.create("trie")

    def answer(stop: StopParams) -> tuple[Sequence, str, StepOutput]:
        s = make_sequence("r", prompt, stop, strategy=strategy, max_draft_nodes=32)
        engine.add(s)
        outputs = run(engine)
        return s, "".join("".join(o.texts) for o in outputs), outputs[-1]

    for _ in range(2):  # the second time most of it is drafted
        s, written, last = answer(StopParams(80))
        assert written == model.tokenizer.decode(s.output)
        s, written, last = answer(StopParams(80, strings=("never there", stop_string)))
        assert written == text[: text.index(stop_string)]
        assert last.finish is not None
        assert (last.finish.reason, last.finish.stop_string) == (FinishReason.STOP, stop_string)
        stop_token = expected[30]
        s, written, last = answer(StopParams(80, token_ids=frozenset({stop_token})))
        assert s.output == expected[: expected.index(stop_token) + 1]
        assert last.finish is not None
        assert last.finish.stop_token_id == stop_token
    assert s.stats.accepted_tokens > 5
    engine.check()


def test_statistics_add_up(engine: Engine) -> None:
    strategy = draftwood_strategies.create("trie")
    for _ in range(2):
        s = sequence(strategy=strategy)
        engine.add(s)
        outputs = run(engine)
    drafted = sum(sum(o.drafted) for o in outputs)
    stats = s.stats
    assert stats.decode_steps == len(outputs)
    assert stats.accepted_tokens == drafted == sum(stats.accepted_by_depth) > 0
    assert s.mean_acceptance_length == pytest.approx(12 / len(outputs))
    assert stats.draft_tokens >= drafted
    assert 0 < stats.arrived_at <= stats.first_scheduled_at < stats.first_token_at <= stats.finished_at
    assert 0 < stats.draft_seconds < stats.step_seconds


class Right(Faulty):
    """Drafts what the model writes."""

    def __init__(self, answer: list[int]) -> None:
        super().__init__("nothing")
        self.answer = answer

    def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
        self.answer = self.answer[len(accepted) :]

    def propose(self, budget: int) -> DraftTree:
        return DraftTree.of(self.answer[:2])


@pytest.mark.parametrize("pays", [False, True])
def test_a_prompt_that_waits_for_steps_to_end_meets_no_drafts(model: LoadedModel, pays: bool) -> None:
    """A sequence whose drafts pay skips three steps and makes up for it in the fourth; others go on writing."""
    engine = Engine(model, EngineConfig(shared_prefill_chunk=4, max_draft_nodes=16, adaptive_budget=False))
    answer = greedy("llama", PROMPT, 80)
    strategy = Right(answer) if pays else Faulty("nothing")
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


def test_a_kv_cache_too_small_for_the_context_is_refused(model: LoadedModel) -> None:
    with pytest.raises(InvalidValueError, match="kv_cache_tokens"):
        Engine(model, EngineConfig(kv_cache_tokens=100))


def test_kv_memory_that_the_device_does_not_have_is_refused_at_start(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mapped(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", mapped)
    with pytest.raises(InvalidValueError, match=r"kv_cache_tokens: 5000 is not allowed; the device has no memory"):
        Engine(model, EngineConfig(kv_cache_tokens=5000))


def test_a_preempted_sequence_drafts_only_at_the_end_of_what_it_wrote(model: LoadedModel) -> None:
    """It is recomputed in chunks of one token, each of which looks like a step that writes."""
    config = EngineConfig(
        max_running=2, prefill_chunk=2, shared_prefill_chunk=2, max_draft_nodes=16, adaptive_budget=False
    )
    engine = Engine(model, config)
    answer = greedy("llama", PROMPT, 60)
    preempted, prompt = sequence(strategy=Right(answer), stop=StopParams(60)), sequence((9,) * 30, tenant="b")
    engine.add(preempted)
    while len(preempted.output) < 20:
        engine.step()
    engine._scheduler._preempt(preempted)
    while engine._pool._prefixes.retained:
        engine._pool._pages.put_back(engine._pool._prefixes.forget_oldest(1))
    engine.add(prompt)
    recomputed = 0
    while preempted.length - preempted.committed > 1:
        drafted, written = preempted.stats.draft_tokens, len(preempted.output)
        engine.step()
        if len(preempted.output) == written:
            recomputed += 1
            assert preempted.stats.draft_tokens == drafted
            assert preempted.state is SequenceState.RUNNING
    assert recomputed > 20
    run(engine)
    assert preempted.output == answer
    engine.close()


def test_waits_for_kv_memory_and_never_exceeds_it(model: LoadedModel) -> None:
    config = EngineConfig(max_running=4, max_draft_nodes=8, kv_cache_tokens=264, adaptive_budget=False)
    engine = Engine(model, config)
    sequences = [sequence(stop=StopParams(n)) for n in (150, 90, 200, 100, 120)]
    for s in sequences:
        engine.add(s)
    seen = 0
    while engine.has_work:
        engine.step()
        engine.check()
        seen = max(seen, engine.running)
    assert 1 < seen < 4
    assert [s.output for s in sequences] == [greedy("llama", PROMPT, s.request.stop.max_tokens) for s in sequences]


def test_the_configuration_names_what_is_wrong() -> None:
    for field in (
        "max_running",
        "prefill_chunk",
        "shared_prefill_chunk",
        "kv_cache_tokens",
        "threads",
        "max_draft_nodes",
    ):
        with pytest.raises(InvalidValueError, match=field):
            replace(EngineConfig(), **{field: -1})  # type: ignore[arg-type]
    for weight in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(InvalidValueError, match="tenant_weights"):
            EngineConfig(tenant_weights={"acme": weight})


def test_a_tenant_s_cost_model_never_reaches_another_nor_another_strategy(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vain drafts of one tenant are counted where its next sequences look, and nowhere else."""
    shown: dict[str, list[tuple[int, float]]] = {}
    given = GuardedDrafter.__init__

    def init(
        self: GuardedDrafter,
        one: Sequence,
        vocab: int,
        failures: Counter[str],
        cost_model: DraftCostModel,
        watchdog: Watchdog | None = None,
    ) -> None:
        shown.setdefault(f"{one.request.tenant} {one.request.strategy_name}", []).append(
            (id(cost_model), cost_model.accepted)
        )
        given(self, one, vocab, failures, cost_model, watchdog)

    monkeypatch.setattr(GuardedDrafter, "__init__", init)
    engine = Engine(model, EngineConfig(max_draft_nodes=16))
    vain = Faulty("nowhere")  # always proposes the same two tokens, which this model never writes
    for tenant, name in (("a", "one"), ("a", "one"), ("b", "one"), ("a", "other"), ("a", "one")):
        engine.add(sequence(strategy=vain, strategy_name=name, tenant=tenant, max_draft_nodes=4))
        run(engine)
    assert len({number for ids in shown.values() for number, _ in ids}) == len(shown) == 3
    assert len({number for number, _ in shown["a one"]}) == 1
    expected = [accepted for _, accepted in shown["a one"]]
    assert expected[0] == 1.0 > expected[1] > expected[2] > 0.0
    assert [shown["b one"][0][1], shown["a other"][0][1]] == [1.0, 1.0]


def test_outputs_have_the_verified_drafts_if_they_are_asked_for(engine: Engine) -> None:
    strategy = draftwood_strategies.create("trie")
    for _ in range(2):
        asking = sequence(strategy=strategy, stop=StopParams(40), draft_trees=True)
        engine.add(asking)
        outputs = run(engine)
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
    engine.add(sequence(strategy=strategy))
    assert all(output.tree is None for output in run(engine))
