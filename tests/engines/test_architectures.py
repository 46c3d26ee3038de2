"""Other architectures on vLLM: tiny random models, with drafts from what they wrote before."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from draftwood_client import Client
from draftwood_model_runner.loading.model import BUNDLED_MODEL
from tests.engines.servers import served_by
from tests.model_runner.families import generate, tiny

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
TOKENS = 40
CHANGES: dict[str, dict[str, int]] = {"qwen3": {}, "mistral": {"head_dim": 32}, "gpt-neox": {"hidden_size": 128}}
"""To heads of 32, which vLLM's kernels for CPUs have."""
PROMPTS = [[7, 31, 5, 120, 66, 31, 5, 9], [200, 3, 14, 15, 92, 65, 35, 89, 79, 3, 23, 84]]


@pytest.mark.parametrize("family", CHANGES)
def test_greedy_answers_are_those_of_transformers_with_drafts(family: str, tmp_path: Path) -> None:
    module = tiny(family, vocab_size=4096, **CHANGES[family])
    module.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(BUNDLED_MODEL).save_pretrained(tmp_path)
    expected = [generate(module, prompt, TOKENS) for prompt in PROMPTS]
    with served_by("vllm", model=str(tmp_path)) as served, Client(served.target, timeout=100) as client:
        accepted = 0
        for round_ in range(30):  # the later ones draft from the earlier; where drafts took long, not in each step
            answers = [client.generate(prompt, max_tokens=TOKENS, ignore_eos=True) for prompt in PROMPTS]
            assert [list(answer.token_ids) for answer in answers] == expected, round_
            accepted += sum(answer.drafting.accepted_tokens for answer in answers)
            if round_ >= 2 and accepted > TOKENS:
                break
        assert accepted > TOKENS
