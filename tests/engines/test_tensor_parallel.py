"""vLLM with two ranks."""

from __future__ import annotations

import pytest

from draftwood_benchmarks.harness.prompts import read_questions
from draftwood_client import Client
from tests.engines.servers import served_by
from tests.engines.test_drafts import accepted_after_learning
from tests.model_runner.families import greedy

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_two_ranks_answer_as_one_and_draft() -> None:
    """On two cores both ranks spin while they wait for each other: the first steps with drafts take ten times as long
    as later ones, and drafts are tried again only after some hundred steps."""
    with served_by("vllm", "--tensor-parallel", "2") as served, Client(served.target, timeout=100) as client:
        for question in read_questions()[0][:2]:
            prompt = list(client.tokenize(question).token_ids)
            assert list(client.generate(prompt, max_tokens=30).token_ids) == greedy("bundled", tuple(prompt), 30)
        assert accepted_after_learning(client, "ranks", seconds=60.0) >= 15
