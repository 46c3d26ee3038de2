"""The engine over vLLM, with a core that writes what a test says: who runs next, where answers end, what is aborted.

vLLM's arguments for several nodes, and what a node does without the service. Real nodes are in tests/engines.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Container, Mapping
from typing import Any

import numpy as np
import pytest

from draftwood_model_runner.errors import EngineStoppedError, ModelError
from draftwood_model_runner.output import (
    ENDING_DIFFERS,
    Answer,
    Finish,
    FinishReason,
    OutputText,
    StepOutput,
    TokenLogprobs,
)
from draftwood_model_runner.request import Request, StopParams
from draftwood_model_runner.sequence import Sequence, SequenceState
from draftwood_service.config import read_settings
from draftwood_service.engine.vllm.engine import VllmEngine
from draftwood_service.engine.vllm.loading import arguments_of
from draftwood_service.engine.vllm.node import _end_with
from draftwood_service.engine.vllm.requests import CoreOutput, CoreStep

EOS = 0


class Core:
    """Takes requests; a test makes the steps.

    Attributes:
        live: salts of requests by their ids.
        dead: the next step raises.
    """

    def __init__(self) -> None:
        self.live: dict[str, str] = {}
        self.aborted: list[str] = []
        self.steps: list[CoreStep] = []
        self.dead = self.closed = False

    @property
    def has_step(self) -> bool:
        return bool(self.steps) or self.dead

    def take(self) -> CoreStep:
        if self.dead:
            raise EngineStoppedError("a process of vLLM has ended")
        return self.steps.pop(0)

    def add(self, request_id: str, prompt: list[int], params: Mapping[str, Any], salt: str) -> None:
        self.live[request_id] = salt

    def abort(self, request_ids: list[str]) -> None:
        for one in request_ids:
            del self.live[one]
            self.aborted.append(one)

    def close(self) -> None:
        self.closed = True

    def write(self, *tokens: int, ended: str = "", drafts: int | None = None) -> None:
        """A step in which all live requests write these tokens."""
        logprobs = [TokenLogprobs(-0.5, [token, 99], [-0.5, -0.9]) for token in tokens]
        self.steps.append(
            CoreStep([CoreOutput(one, [*tokens], logprobs, ended, 1.0, 0, 3, drafts) for one in self.live], 0.5)
        )
        if ended:
            self.live.clear()


class Records:
    """Says that four tokens were drafted for each step."""

    def read(self, live: Container[str]) -> None: ...

    def drafted(self, request_id: str, sequence: Sequence) -> int:
        return 4

    def end(self, request_id: str) -> None: ...


class Letters:
    def push(self, token: int) -> str:
        return chr(token)

    def close(self) -> str:
        return ""


def engine_over(core: Core, slots: int = 2, **weights: float) -> VllmEngine:
    fakes: Any = {"core": core, "records": Records()}
    return VllmEngine(
        slots=slots,
        pages=100,
        weights=weights,
        params=lambda request: {},
        text=lambda request: OutputText(Letters(), request.stop, frozenset({EOS})),
        **fakes,
    )


def sequence(tenant: str = "acme", arrived_at: float = 1.0, **stop: Any) -> Sequence:
    params = StopParams(**{"max_tokens": 50, **stop})
    prompt = np.array([1, 2], np.int32)
    return Sequence(Request(request_id="r", prompt=prompt, stop=params, tenant=tenant, arrived_at=arrived_at))


def stepped(engine: VllmEngine) -> list[StepOutput]:
    assert engine.has_work
    return engine.step()


def test_a_step_writes_drafted_tokens_and_the_models_own() -> None:
    core = Core()
    engine, one = engine_over(core), sequence()
    engine.add(one)
    core.write(*b"abc")
    [output] = stepped(engine)
    assert (output.token_ids, output.texts, output.drafted) == ([97, 98, 99], ["a", "b", "c"], [True, True, False])
    stats = one.stats
    assert (stats.decode_steps, stats.draft_tokens, stats.accepted_tokens, stats.accepted_by_depth) == (1, 4, 2, [1, 1])
    assert (stats.first_scheduled_at, stats.cached_prompt_tokens) == (1.0, 3)
    assert not engine.has_work
    assert not engine.idle
    assert engine.kv_use == (100, 50, 0)
    core.write(EOS, ended="stop", drafts=7)
    [output] = stepped(engine)
    assert output.finish == Finish(FinishReason.STOP, stop_token_id=EOS)
    assert (one.state, stats.draft_tokens, engine.idle, core.aborted) == (SequenceState.FINISHED, 7, True, [])


def test_a_stop_string_ends_in_the_middle_of_a_step_and_aborts() -> None:
    core = Core()
    engine, one = engine_over(core), sequence(strings=("bc",))
    engine.add(one)
    core.write(*b"abcde")
    [output] = stepped(engine)
    assert (output.token_ids, "".join(output.texts)) == ([97, 98, 99], "a")
    assert output.finish == Finish(FinishReason.STOP, stop_string="bc")
    assert len(output.logprobs) == 3
    assert one.stats.accepted_tokens == 3  # of the four that vLLM accepted
    assert len(core.aborted) == 1
    assert engine.idle


def test_vllm_gets_as_many_as_run_and_the_others_wait_by_weight() -> None:
    core = Core()
    engine = engine_over(core, slots=2, heavy=3.0)
    many = [sequence("many", float(i)) for i in range(6)]
    for one in many:
        engine.add(one)
    late = sequence("late", 9.0)
    engine.add(late)
    assert [*core.live.values()] == ["many", "many"]
    engine.cancel(many[0])
    assert [*core.live.values()] == ["many", "late"]
    engine.cancel(many[5])  # it waits: nothing to abort
    assert len(core.aborted) == 1
    core.write(EOS, ended="stop")
    stepped(engine)
    assert [one.state for one in many[2:5]] == [SequenceState.RUNNING, SequenceState.RUNNING, SequenceState.WAITING]
    engine.close()
    assert core.closed
    assert engine.idle


def test_what_vllm_ends_by_itself() -> None:
    core = Core()
    engine = engine_over(core, slots=1)
    engine.add(failed := sequence())
    core.write(*b"a", ended="error")
    [output] = stepped(engine)
    assert output.finish is not None
    assert isinstance(output.finish.error, ModelError)
    assert failed.state is SequenceState.FINISHED
    engine.add(sequence(strings=("ab",)))
    core.write(*b"a", ended="length")
    [output] = stepped(engine)
    assert (output.texts, output.finish) == (["a"], Finish(FinishReason.LENGTH))


def test_output_after_the_end_is_dropped_and_a_dead_core_ends_the_step() -> None:
    core = Core()
    engine, one = engine_over(core), sequence()
    engine.add(one)
    core.write(*b"a")
    engine.cancel(one)
    assert stepped(engine) == []
    core.dead = True
    with pytest.raises(EngineStoppedError):
        stepped(engine)


def test_an_audit_runs_while_nothing_else_does_and_compares() -> None:
    core = Core()
    engine = engine_over(core)
    answer = Answer(sequence().request, (97, 98, EOS), Finish(FinishReason.STOP, stop_token_id=EOS))
    audit = engine.redecode(answer)
    audit.step()
    assert audit.waits
    core.write(*b"a")
    assert stepped(engine) == []
    engine.add(live := sequence())  # it starts over after this one
    assert not audit.waits
    assert len(core.live) == 1
    engine.cancel(live)
    audit.step()
    core.write(*b"a")
    core.write(*b"b")
    core.write(EOS, ended="stop")
    for _ in range(3):
        stepped(engine)
    assert (audit.done, audit.difference) == (True, None)


@pytest.mark.parametrize(
    ("written", "again", "position", "margin"), [((97, 99), b"ad", 1, 0.4 / 16), ((97, 98), b"ab", 2, ENDING_DIFFERS)]
)
def test_an_audit_finds_differences(written: tuple[int, ...], again: bytes, position: int, margin: float) -> None:
    """Another token, and an answer that goes on where the other one ended."""
    core = Core()
    engine = engine_over(core)
    audit = engine.redecode(Answer(sequence().request, written, Finish(FinishReason.LENGTH)))
    audit.step()
    core.write(*again)
    stepped(engine)
    assert audit.done
    assert audit.difference is not None
    assert audit.difference.position == position
    assert audit.difference.margin == pytest.approx(margin)
    assert core.live == {}


def test_nodes_are_vllms_own_and_pipelines_have_no_drafts() -> None:
    def made(*flags: str) -> dict[str, Any]:
        return arguments_of(read_settings(["--engine", "vllm", *flags], {}))

    expected = {"nnodes": 2, "node_rank": 1, "master_addr": "a.b", "distributed_executor_backend": "mp"}
    found = made("--tensor-parallel", "4", "--nodes", "2", "--node-rank", "1", "--leader", "a.b")
    assert found.items() >= {**expected, "tensor_parallel_size": 4, "pipeline_parallel_size": 1}.items()
    assert "speculative_config" in found
    assert not expected.keys() & made().keys()
    assert not {"speculative_config", "per_request_spec_decode_metrics"} & made("--pipeline-parallel", "2").keys()


def test_a_node_ends_with_its_leader() -> None:
    class Executor:
        """vLLM's, of a node."""

        def __init__(self) -> None:
            self.ended = threading.Event()

        def shutdown(self) -> None:
            self.ended.set()

    executor = Executor()
    with socket.create_server(("127.0.0.1", 0)) as leader:
        address = leader.getsockname()
        watching = threading.Thread(target=_end_with, args=(address, executor))
        watching.start()
        connection, _ = leader.accept()
        assert not executor.ended.wait(0.2)
    connection.close()
    watching.join(10)
    assert executor.ended.is_set()
    gone = Executor()
    _end_with(address, gone)
    assert gone.ended.is_set()
