"""vLLM's ranks on several nodes: processes that share nothing but a network, started as on machines of their own."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from draftwood_benchmarks.harness.prompts import read_questions
from draftwood_client import Client
from tests.engines.servers import served_by, started_by
from tests.engines.test_drafts import accepted_after_learning
from tests.memory.servers import free_port
from tests.model_runner.families import greedy

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def assert_answers_are_those_of_one_process(client: Client) -> None:
    for question in read_questions()[0][:2]:
        prompt = list(client.tokenize(question).token_ids)
        assert list(client.generate(prompt, max_tokens=30).token_ids) == greedy("bundled", tuple(prompt), 30)


@contextmanager
def two_nodes(*flags: str) -> Iterator[tuple[Client, subprocess.Popen[bytes]]]:
    """A client of the leader, and the other node, which ends with the leader after SIGTERM to both."""
    of_both = [*flags, "--nodes", "2", "--leader", "127.0.0.1"]
    port = free_port()
    python, environment, own = started_by("vllm", master_port=port)
    command = [python, "-m", "draftwood_service", "--port", "0", *own, *of_both, "--node-rank", "1"]
    other = subprocess.Popen(command, env={**os.environ, **environment})
    try:
        with (
            served_by("vllm", *of_both, master_port=port) as served,
            Client(served.target, timeout=100) as client,
        ):
            yield client, other
            other.send_signal(signal.SIGTERM)  # as when a group of pods ends
            assert_answers_are_those_of_one_process(client)
        assert other.wait(60) == 0
    finally:
        other.kill()
        other.wait()


def test_two_nodes_answer_as_one_process_and_draft_and_end_together() -> None:
    with two_nodes("--tensor-parallel", "2") as (client, _):
        assert_answers_are_those_of_one_process(client)
        assert accepted_after_learning(client, "nodes", seconds=60.0) >= 15
