"""Models that attend in code of their own: the answers of `generate`, also where pages are shared and taken back."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import transformers as tf

from draftwood_model_runner.request import StopParams
from draftwood_model_runner.runners.model_calls import follow_positions, positions_of_step
from tests.model_runner.families import generate, taken_over
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.sequences import batch_of, engine_of, run
from tests.model_runner.small_models import small_model

_CONTEXT = 128


@pytest.mark.parametrize("family", ["bloom", "gptj"])
@torch.inference_mode()
def test_shared_prefixes_and_preempted_sequences_change_nothing(family: str) -> None:
    """Over chains and over trees."""
    module = small_model(family)
    module.generation_config = tf.GenerationConfig()
    random = np.random.default_rng(0)
    common = random.integers(3, 128, 40, np.int32)
    prompts = [np.concatenate([common, random.integers(3, 128, n, np.int32)]) for n in (3, 9, 20, 33)]
    answers = [generate(module, prompt, 30) for prompt in prompts]
    model = taken_over(copy.deepcopy(module), name="small", max_context=_CONTEXT, defaults="greedy")
    oracle = OracleStrategy(dict(zip([tuple(prompt.tolist()) for prompt in prompts], answers, strict=True)), 128, 0)
    engine, stop = engine_of(model, 16, max_running=4, kv_cache_tokens=208), StopParams(30)
    for _ in range(2):  # the second time prefixes are in the cache
        batch = batch_of(prompts, stop, strategy=oracle, max_draft_nodes=8)
        run(engine, *batch)
        assert [sequence.output for sequence in batch] == answers
        assert sum(sequence.stats.accepted_tokens for sequence in batch) > 30


@torch.inference_mode()
def test_positions_reach_embeddings_only_within_a_step() -> None:
    config = tf.BartConfig(
        vocab_size=128, d_model=32, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=32, is_decoder=True
    )
    module = tf.BartForCausalLM(config).eval()
    ids = torch.tensor([[5, 6, 6]])
    before = module(input_ids=ids).logits
    assert follow_positions(module) == 1
    assert follow_positions(module) == 1  # once more adds nothing
    assert torch.equal(module(input_ids=ids).logits, before)
    with positions_of_step(torch.tensor([[0, 1, 1]])):
        embedded = module.model.decoder.embed_positions(ids, 0)
    assert torch.equal(embedded[0, 1], embedded[0, 2])
    assert not torch.equal(embedded[0, 0], embedded[0, 1])
