"""vLLM with two ranks."""

from __future__ import annotations

import pytest

from draftwood_benchmarks.harness.prompts import read_questions
from draftwood_client import Client
from tests.engines.servers import served_by
from tests.model_runner.families import greedy

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_two_ranks_answer_as_one_and_draft() -> None:
    """Whether drafts pay is not asked here: on two cores, both ranks spin while they wait for each other."""
    with served_by("vllm", "--tensor-parallel", "2") as served, Client(served.target, timeout=100) as client:
        drafted = 0
        for question in [*read_questions()[0][:2], *read_questions()[0][:2]]:
            prompt = list(client.tokenize(question).token_ids)
            answer = client.generate(prompt, max_tokens=30, tenant="ranks")
            assert list(answer.token_ids) == greedy("bundled", tuple(prompt), 30)
            drafted += answer.drafting.draft_tokens
        assert drafted > 0
