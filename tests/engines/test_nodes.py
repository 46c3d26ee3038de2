"""vLLM's ranks, on one node and on several, which share nothing but a network, as machines of their own."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from draftwood_benchmarks.harness.prompts import read_questions
from draftwood_benchmarks.harness.servers import server_process
from draftwood_client import Client, UnavailableError
from tests.engines.servers import served_by, started_by, until
from tests.engines.test_drafts import learned
from tests.engines.test_failures import serves_again
from tests.memory.servers import free_port
from tests.model_runner.families import greedy
from tests.vllm.engine import PYTHON

Node = subprocess.Popen[bytes]
RAY = PYTHON.with_name("ray")

pytestmark = [pytest.mark.timeout(900)]


def assert_answers_are_those_of_one_process(client: Client) -> None:
    for question in read_questions()[0][:2]:
        prompt = list(client.tokenize(question).token_ids)
        assert list(client.generate(prompt, max_tokens=30).token_ids) == greedy("bundled", tuple(prompt), 30)


@pytest.mark.vllm
def test_two_ranks_of_one_node_answer_as_one_process_and_draft() -> None:
    """On two cores both ranks spin while they wait for each other: the first steps with drafts take ten times as long
    as later ones, and drafts are tried again only after some hundred steps."""
    with served_by("vllm", "--tensor-parallel", "2") as served, Client(served.target, timeout=100) as client:
        assert_answers_are_those_of_one_process(client)
        learned(client, "ranks")


@contextmanager
def two_nodes(*flags: str) -> Iterator[tuple[Client, Node, Callable[[], Node]]]:
    """A client of the leader, the other node, and what starts another one; the last one gets SIGTERM before the end."""
    of_both = [*flags, "--nodes", "2", "--leader", "127.0.0.1"]
    port = free_port()
    python, environment, own = started_by("vllm", master_port=port)
    command = [python, "-m", "draftwood_service", "--port", "0", *own, *of_both, "--node-rank", "1"]
    others: list[Node] = []

    def start() -> Node:
        others.append(subprocess.Popen(command, env={**os.environ, **environment}))
        return others[-1]

    first = start()
    try:
        with (
            served_by("vllm", *of_both, master_port=port) as served,
            Client(served.target, timeout=100) as client,
        ):
            yield client, first, start
        assert others[-1].wait(60) == 0
    finally:
        for other in others:
            other.kill()
            other.wait()


@pytest.mark.vllm
def test_two_nodes_answer_as_one_process_and_draft_and_end_together() -> None:
    with two_nodes("--tensor-parallel", "2") as (client, other, _):
        assert_answers_are_those_of_one_process(client)
        learned(client, "nodes")
        other.send_signal(signal.SIGTERM)  # as when a group of pods ends
        assert_answers_are_those_of_one_process(client)


@pytest.mark.slow
def test_a_node_that_dies_is_joined_again() -> None:
    with two_nodes("--tensor-parallel", "2") as (client, other, start):
        assert_answers_are_those_of_one_process(client)
        for process in psutil.Process(other.pid).children(recursive=True):
            process.kill()
        assert other.wait(60) == 1
        with pytest.raises(UnavailableError):
            client.generate([1, 700, 701], max_tokens=8)
        again = start()
        serves_again(client, 400.0)
        assert_answers_are_those_of_one_process(client)
        again.send_signal(signal.SIGTERM)


@contextmanager
def ray_nodes(folder: Path) -> Iterator[dict[str, str]]:
    """Two nodes of Ray on this machine. Yields the variables of what calls them, among them their token."""
    port = free_port()
    _, environment, _ = started_by("vllm")
    environment["PYTHONPATH"] += os.pathsep + str(Path(__file__).with_name("ray_on_cpus"))
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    options = ["--num-cpus=2", "--num-gpus=1", "--object-store-memory=100000000", "--node-ip-address=127.0.0.1"]
    leader = ["--head", f"--port={port}", f"--temp-dir={folder}", "--include-dashboard=false"]
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for own in (leader, [f"--address=127.0.0.1:{port}"]):
            command = [str(RAY), "start", "--block", *own, *options]
            nodes.append(subprocess.Popen(command, env={**os.environ, **environment}, start_new_session=True))
            until(lambda: _ray_status(port, environment).count(" node_") == len(nodes))
        assert "Unauthenticated" in _ray_status(port, {**environment, "RAY_AUTH_TOKEN": "0" * 64})
        yield {**environment, "RAY_ADDRESS": f"127.0.0.1:{port}"}
    finally:
        for node in reversed(nodes):
            node.terminate()
            node.wait(60)


def _ray_status(port: int, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [str(RAY), "status", f"--address=127.0.0.1:{port}"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("way", ["tensor", "pipeline"])
def test_two_nodes_of_ray_answer_as_one_process(way: str) -> None:
    with tempfile.TemporaryDirectory(prefix="draftwood-ray-") as folder, ray_nodes(Path(folder)) as environment:
        # vLLM's build for CPUs runs stages in compiled models alone.
        python, _, own = started_by("vllm", distributed_executor_backend="ray", enforce_eager=way == "tensor")
        with (
            server_process(*own, f"--{way}-parallel", "2", environment=environment, python=python) as server,
            Client(server.target, timeout=100) as client,
        ):
            assert_answers_are_those_of_one_process(client)
            if way == "tensor":  # vLLM drafts nothing for stages
                learned(client, "ray")
