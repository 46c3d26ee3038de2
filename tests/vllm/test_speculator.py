"""The speculator in a model runner that stands in for vLLM's second one; with the real one: `test_second_engine`."""

from __future__ import annotations

import logging
import sys
from abc import ABC
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from threading import Barrier
from types import ModuleType, SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch

from draftwood_tenants.engines import ServedModel
from draftwood_vllm import device_support
from tests.vllm.fake_trie import DeviceSizes, DeviceTrie

RUNNER = "vllm.v1.worker.gpu.model_runner"
LONGEST, LENGTH, ROWS = 4, 256, 4
PROMPT = [5, 6, 7, 8, 9]


class Runner:
    """Does with requests what vLLM's second runner does with them; its model repeats the numbers from 5 to 9."""

    def __init__(self, config: Any, speculator: Any) -> None:
        self.req_states = SimpleNamespace(
            req_id_to_index={},
            max_seq_len=[0] * ROWS,
            all_token_ids=SimpleNamespace(gpu=torch.zeros((ROWS, LENGTH), dtype=torch.int32)),
            total_len=SimpleNamespace(gpu=torch.zeros(ROWS, dtype=torch.int32)),
            last_sampled_tokens=torch.zeros((ROWS, 1), dtype=torch.int64),
        )
        self.temperatures = torch.zeros(ROWS)
        self.model_memory_usage = 0
        self.speculator: Any = None
        self.speculator = speculator(config, torch.device("cpu"))

    @property
    def ours(self) -> Any:
        """Our part of the speculator, which drafts alone or beside another."""
        return self.speculator.propose.__self__

    @property
    def memory(self) -> Any:
        return self.ours._opened.drafts

    def close(self) -> None:
        if self.ours._opened is not None:
            self.ours._opened.close()

    def load_model(self) -> str:
        return "loaded"

    def add_requests(self, output: Any) -> None:
        states = self.req_states
        for one in output.scheduled_new_reqs:
            index = next(i for i in range(ROWS) if i not in states.req_id_to_index.values())
            states.req_id_to_index[one.req_id] = index
            known = len(one.prefill_token_ids)
            states.max_seq_len[index] = len(one.prompt_token_ids) + one.sampling_params.max_tokens
            states.all_token_ids.gpu[index, :known] = torch.tensor(one.prefill_token_ids, dtype=torch.int32)
            states.total_len.gpu[index] = known

    def finish_requests(self, output: Any) -> None:
        for name in {*output.finished_req_ids, *output.preempted_req_ids}:
            self.req_states.req_id_to_index.pop(name, None)

    def step(self, new: Sequence[Any] = (), finished: Sequence[str] = (), preempted: Sequence[str] = ()) -> Any:
        """int64[rows, k], the drafts after a step in which each request writes what its draft began with."""
        output = SimpleNamespace(scheduled_new_reqs=new, finished_req_ids={*finished}, preempted_req_ids={*preempted})
        self.finish_requests(output)
        self.add_requests(output)
        states, names = self.req_states, [*self.req_states.req_id_to_index]
        for index in states.req_id_to_index.values():
            length = int(states.total_len.gpu[index])
            token = 5 + (int(states.all_token_ids.gpu[index, length - 1]) - 4) % 5
            states.all_token_ids.gpu[index, length] = token
            states.last_sampled_tokens[index] = token
            states.total_len.gpu[index] += 1
        ones = torch.ones(len(names), dtype=torch.int32)
        indexes = torch.tensor([*states.req_id_to_index.values()], dtype=torch.int64)
        batch = SimpleNamespace(num_reqs=len(names), req_ids=names, idx_mapping=indexes)
        last, temperatures = states.last_sampled_tokens, self.temperatures
        return self.speculator.propose(
            batch, None, None, None, None, ones, 0 * ones, last, None, temperatures, None, mm_inputs=None
        )


Load: TypeAlias = Callable[..., Runner]


def new(name: str, prompt: Sequence[int] = PROMPT, output: Sequence[int] = (), tokens: int = 30, **options: Any) -> Any:
    params = SimpleNamespace(extra_args=options, all_stop_token_ids={99}, max_tokens=tokens)
    return SimpleNamespace(
        req_id=name,
        prompt_token_ids=[*prompt],
        prefill_token_ids=[*prompt, *output],
        prompt_embeds=None,
        sampling_params=params,
    )


def config(rows: int = ROWS) -> Any:
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=LONGEST),
        scheduler_config=SimpleNamespace(max_num_seqs=rows),
        model_config=SimpleNamespace(max_model_len=LENGTH, get_vocab_size=lambda: 1000),
        parallel_config=SimpleNamespace(data_parallel_size=1),
    )


class Group:
    """A rank in vLLM's group of tensor parallelism, here a thread.

    Args:
        values: of each rank, which all share.
    """

    def __init__(self, rank: int, values: list[Any], barrier: Barrier) -> None:
        self.rank_in_group, self.world_size = rank, len(values)
        self._values, self._barrier = values, barrier
        self.cpu_group = self
        self.messages = 0

    def broadcast_object(self, value: Any, src: int) -> Any:
        assert src == 0  # through shared memory, of which the first rank alone is the writer
        self.messages += 1
        return self.gathered(value)[src]

    def gathered(self, value: Any) -> list[Any]:
        self._values[self.rank_in_group] = value
        self._barrier.wait(60)
        found = [*self._values]
        self._barrier.wait(60)
        return found


@pytest.fixture
def groups() -> list[Any]:
    """The groups that ranks are in, one for each runner that loads its model; of a rank alone if there are no more."""
    return []


@pytest.fixture
def speculator(monkeypatch: pytest.MonkeyPatch, groups: list[Any]) -> Iterator[Any]:
    """Our class, with modules in the place of vLLM's."""
    modules: dict[str, Any] = {name: ModuleType(name) for name in (RUNNER, "vllm.distributed.parallel_state")}
    base: Any = ModuleType("vllm.v1.worker.gpu.spec_decode.speculator")
    base.BaseSpeculator = type("BaseSpeculator", (ABC,), {})
    modules[base.__name__] = base
    modules[RUNNER].GPUModelRunner = Runner
    alone = SimpleNamespace(world_size=1)
    modules["vllm.distributed.parallel_state"].get_tp_group = lambda: groups.pop(0) if groups else alone
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "draftwood_vllm.speculator", raising=False)
    ours = import_module("draftwood_vllm.speculator")
    made = device_support.DeviceModule(DeviceSizes, DeviceTrie)
    monkeypatch.setattr(device_support, "load", lambda: made)

    def gather(votes: list[bool], value: bool, group: Group) -> None:
        votes[:] = group.gathered(value)

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    monkeypatch.setattr(ours, "served_model", lambda config: ServedModel(None, "model", {}, 1000))
    monkeypatch.setenv("DRAFTWOOD_MEMORY_TOKENS", "1024")
    yield ours.Speculator
    sys.modules.pop("draftwood_vllm.speculator", None)
    logging.getLogger("draftwood").propagate = True


@pytest.fixture
def load(speculator: Any) -> Iterator[Load]:
    """Makes a runner whose model is loaded; its memory is closed after the test."""
    made: list[Runner] = []

    def loaded(make: Any = speculator, rows: int = ROWS) -> Runner:
        made.append(Runner(config(rows), make))
        assert made[-1].load_model() == "loaded"
        return made[-1]

    yield loaded
    for runner in made:
        runner.close()


@pytest.fixture
def runner(load: Load) -> Runner:
    return load()


def test_requests_are_drafted_for_and_learned(runner: Runner) -> None:
    """The arena is left free of vLLM's cache."""
    assert runner.model_memory_usage == DeviceSizes(ROWS, LENGTH, 17, 1024, LONGEST, LONGEST).nbytes
    assert runner.step([new("a")]).tolist() == [[6, 7, 8, 9]]
    assert runner.step([new("b", [1])]).tolist() == [[7, 8, 9, 5], [7, 7, 7, 7]]
    runner.step(finished=["a", "b"])
    assert (len(runner.memory), len(runner.ours._drafts)) == (0, 0)
    runner.memory.take_in()
    assert runner.memory.memory.counters().learned == 2


def test_a_tenants_answers_are_drafted_for_its_requests_alone(runner: Runner) -> None:
    runner.step([new("a", draftwood_tenant="acme")])
    for _ in range(6):
        runner.step()
    others = [
        new("b", [1], draftwood_tenant="acme"),
        new("c", [1], draftwood_tenant="other"),
        new("d", [1], draftwood="off"),
    ]
    drafts = runner.step(others, finished=["a"])
    assert drafts.tolist() == [[8, 9, 5, 6], [7] * 4, [7] * 4]


def test_the_confidences_are_there_for_adaptive_verification(runner: Runner) -> None:
    runner.speculator.enable_adaptive_verification = True
    runner.step([new("a", tokens=4), new("b", draftwood="off")])
    confidences = runner.speculator.draft_token_confidence_probs[:2]
    assert confidences[0].tolist() == pytest.approx([0.9, 0.9, 0, 0])
    assert confidences[1].tolist() == [0] * LONGEST


def test_vllms_own_requests_are_not_drafted_for(runner: Runner) -> None:
    drafts = runner.step([new("_warmup_0_"), new("_v2_mixed_warmup_decode_"), new("pooling")])
    assert drafts.tolist() == [[5] * 4, [5] * 4, [6, 7, 8, 9]]
    assert len(runner.memory) == 1
    dummy = runner.speculator.propose(SimpleNamespace(num_reqs=3), *[None] * 7, dummy_run=True, is_profile=True)
    assert dummy.shape == (3, LONGEST)


def test_a_preempted_request_goes_on_in_another_row(runner: Runner) -> None:
    runner.step([new("a"), new("b", [1])])
    runner.step(preempted=["a"])
    assert len(runner.ours._drafts) == 1
    drafts = runner.step([new("c", [1]), new("a", output=[5, 6])]).tolist()
    assert drafts[-1] == [8, 9, 5, 6]
    runner.step(finished=["a", "b", "c"])
    runner.memory.take_in()
    [resident] = runner.memory.memory.residents.all()
    assert [5, 6, 7] in [logged.record.tokens.tolist() for logged in resident.log]


def test_an_arena_that_does_not_fit_costs_the_drafts_and_one_line(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    assert load(rows=2000).step([new("a")]).tolist() == [[5] * 4]
    sizes = "drafts for 2000 rows of 256 tokens and 17 tenants of 1024 tokens"
    settings = "(max_num_seqs, DRAFTWOOD_MAX_TENANTS, DRAFTWOOD_MEMORY_TOKENS)"
    needed = DeviceSizes(2000, LENGTH, 17, 1024, LONGEST, LONGEST).nbytes
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "vLLM of an unknown version goes on without drafts of Draftwood:"
        f" ValueError: {sizes} {settings} do not fit the device: rows=2000 need {needed} bytes"
    ]


def test_a_failure_costs_the_drafts_and_no_step_and_one_of_the_memory_no_draft(
    runner: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks must not differ in whether they draft."""
    runner.memory.written = None
    assert runner.step([new("a")]).tolist() == [[6, 7, 8, 9]]
    assert runner.step().tolist() == [[7, 8, 9, 5]]
    assert caplog.text.count("is learned by this process alone") == 1
    runner.ours._drafts._trie.propose_chains = None
    for token in (7, 8):
        assert runner.step().tolist() == [[token] * 4]
    assert caplog.text.count("goes on without drafts of Draftwood") == 1
    runner.step(finished=["a"])


def test_it_does_without_a_runner_that_it_does_not_know(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    del sys.modules[RUNNER].GPUModelRunner
    assert load().step([new("a")]).tolist() == [[5] * 4]
    assert "it cannot be bound to the model runner" in caplog.text


class Ranks:
    """Two runners, each on a thread of its own."""

    def __init__(self, speculator: Any, groups: list[Any]) -> None:
        values, barrier = [None, None], Barrier(2)
        self.groups = [Group(rank, values, barrier) for rank in range(2)]
        self.runners = [Runner(config(), speculator) for _ in range(2)]
        self._threads = [ThreadPoolExecutor(1) for _ in range(2)]
        groups += self.groups
        self._both(lambda runner: runner.load_model())

    def steps(self) -> Iterator[tuple[bool, torch.Tensor]]:
        """Steps in which requests of two tenants come and go: whether any came, and the drafts of either rank."""
        for number in range(12):
            comes = number % 3 == 0
            joins = [new(f"{number}", [*PROMPT, number], draftwood_tenant="ab"[number % 2])] if comes else []
            gone = [f"{number - 6}"] if comes and number >= 6 else []
            one, other = self._both(lambda runner, joins=joins, gone=gone: runner.step(joins, gone).clone())
            assert torch.equal(one, other)
            yield comes, one

    def close(self) -> None:
        for runner in self.runners:
            runner.close()

    def _both(self, work: Any) -> list[Any]:
        """What each runner's work returns."""
        waiting = [thread.submit(work, runner) for thread, runner in zip(self._threads, self.runners, strict=True)]
        return [one.result(120) for one in waiting]


def test_ranks_draft_alike_and_exchange_no_drafts(speculator: Any, groups: list[Any]) -> None:
    """What only the first one knows, tenants and what the store brings, it tells the others as requests join."""
    ranks = Ranks(speculator, groups)
    [leader] = [runner for runner in ranks.runners if runner.ours._opened is not None]
    drafted, told = 0, [group.messages for group in ranks.groups]
    for number, (comes, drafts) in enumerate(ranks.steps()):
        told = [before + comes for before in told]
        assert [group.messages for group in ranks.groups] == told
        drafted += int((drafts != drafts[:, -1:]).sum())
        region = next(iter(leader.memory._live.values())).region
        leader.memory._changes.put((region, torch.arange(number, number + 5, dtype=torch.int32).numpy()))
    assert drafted > 10
    tries = [runner.ours._drafts._trie for runner in ranks.runners]
    assert tries[0].tenants == tries[1].tenants
    assert any(len(texts) > 1 for texts in tries[0].tenants.values())
    ranks.close()


def test_a_rank_that_cannot_draft_costs_all_their_drafts(
    speculator: Any, groups: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def only_one(sizes: Any, device: Any) -> Any:
        made.append(sizes)
        if len(made) == 2:
            raise ValueError("no memory")
        return DeviceTrie(sizes, device)

    device = device_support.DeviceModule(DeviceSizes, only_one)
    monkeypatch.setattr(device_support, "load", lambda: device)
    ranks = Ranks(speculator, groups)
    assert [runner.ours._drafts for runner in ranks.runners] == [None, None]
    problems = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert sorted("no memory" in problem for problem in problems) == [False, True]
