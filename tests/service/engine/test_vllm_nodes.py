"""vLLM's arguments for several nodes, and what a node does without the service. Real nodes are in tests/engines."""

from __future__ import annotations

import socket
import threading

from draftwood_service.config import read_settings
from draftwood_service.engine.vllm.loading import arguments_of
from draftwood_service.engine.vllm.node import _end_with
from draftwood_vllm.opening import _recorder
from draftwood_vllm.service_link import ELSEWHERE, HOST_VARIABLE, SOCKET_VARIABLE, end_with_service


def test_nodes_are_vllms_own() -> None:
    flags = ["--engine", "vllm", "--tensor-parallel", "4", "--nodes", "2", "--node-rank", "1", "--leader", "a.b"]
    made = arguments_of(read_settings(flags, {}))
    expected = {"nnodes": 2, "node_rank": 1, "master_addr": "a.b", "distributed_executor_backend": "mp"}
    assert made.items() >= {**expected, "tensor_parallel_size": 4, "pipeline_parallel_size": 1}.items()
    assert "speculative_config" in made
    assert not expected.keys() & arguments_of(read_settings(["--engine", "vllm"], {})).keys()


def test_there_are_no_drafts_with_pipeline_parallelism() -> None:
    made = arguments_of(read_settings(["--engine", "vllm", "--pipeline-parallel", "2"], {}))
    assert made["pipeline_parallel_size"] == 2
    assert not {"speculative_config", "per_request_spec_decode_metrics"} & made.keys()


def test_a_node_without_the_service_reports_to_nobody_and_goes_on() -> None:
    before = threading.active_count()
    end_with_service({SOCKET_VARIABLE: ELSEWHERE, HOST_VARIABLE: "1"})
    assert threading.active_count() == before
    assert _recorder(ELSEWHERE) is None


class Executor:
    """vLLM's, of a node."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def shutdown(self) -> None:
        self.ended.set()


def test_a_node_ends_with_its_leader() -> None:
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
