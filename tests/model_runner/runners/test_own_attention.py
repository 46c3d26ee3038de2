"""Models that attend in code of their own: the answers of `generate`, also where pages are shared and taken back."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

from draftwood_model_runner.errors import UnsupportedModelError
from draftwood_model_runner.loading.model import adopt
from draftwood_model_runner.request import StopParams
from draftwood_model_runner.runners.model_inputs import follow_positions, positions_of_step
from draftwood_model_runner.runners.shrinking import randomized
from draftwood_model_runner.runners.torch.packed_linear import PackedLinear, noted_calls, pack_linears
from draftwood_model_runner.runners.torch.probe import probe
from tests.model_runner.families import generate
from tests.model_runner.sequences import engine_of, make_sequence, run
from tests.model_runner.tiny import build
from tools.model_sweep.families import small_model
from tools.model_sweep.trial import KnownAnswer, known_tokenizer

_CONTEXT = 128
_BLOOM: dict[str, Any] = {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128}
_GPT_J: dict[str, Any] = {"vocab_size": 128, "n_positions": _CONTEXT, "n_embd": 64, "n_layer": 2, "n_head": 4}
_GPT_J |= {"rotary_dim": 8}


def bloom() -> Any:
    return randomized(build(tf.BloomConfig(**_BLOOM)))


def gpt_j() -> Any:
    return randomized(build(tf.GPTJConfig(**_GPT_J)))


@pytest.mark.parametrize(
    ("module", "masks"),
    [
        (bloom, None),
        (lambda: small_model("falcon"), "one"),
        (lambda: small_model("axk2"), "by kind"),
        (lambda: small_model("deepseek_v4"), None),
    ],
    ids=["bloom", "falcon", "axk2", "deepseek_v4"],
)
def test_how_a_model_is_computed(module: Any, masks: str | None) -> None:
    layout = probe(module(), exact=False, max_context=_CONTEXT)
    assert layout.own is not None
    assert layout.own.tree_masks == masks


@pytest.mark.parametrize("make", [bloom, gpt_j], ids=["chains", "trees"])
@torch.inference_mode()
def test_shared_prefixes_and_preempted_sequences_change_nothing(make: Any) -> None:
    module = make()
    module.generation_config = tf.GenerationConfig()
    random = np.random.default_rng(0)
    common = random.integers(3, 128, 40, np.int32)
    prompts = [np.concatenate([common, random.integers(3, 128, n, np.int32)]) for n in (3, 9, 20, 33)]
    answers = [generate(module, prompt, 30) for prompt in prompts]
    model = adopt(copy.deepcopy(module), known_tokenizer(), name="small", max_context=_CONTEXT, defaults="greedy")
    engine, stop = engine_of(model, 16, max_running=4, kv_cache_tokens=208), StopParams(30)
    for _ in range(2):  # the second time prefixes are in the cache
        batch = [
            make_sequence(str(i), prompt, stop, strategy=KnownAnswer(answer, 128, i), max_draft_nodes=8)
            for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]
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


class _Router(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classifier = torch.nn.Linear(8, 4)
        self.out = torch.nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.out(inputs)
        return hidden @ self.classifier.weight.T


@torch.inference_mode()
def test_a_layer_whose_weight_is_read_is_not_packed() -> None:
    router, inputs = _Router().eval(), torch.randn(3, 8)
    with noted_calls(router) as called:
        expected = router(inputs)
    pack_linears(router, called)
    assert isinstance(router.out, PackedLinear)
    assert not isinstance(router.classifier, PackedLinear)
    torch.testing.assert_close(router(inputs), expected)


def test_a_model_without_a_cache_is_refused() -> None:
    config = tf.OpenAIGPTConfig(vocab_size=128, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    with pytest.raises(UnsupportedModelError, match="in a cache of transformers"):
        probe(randomized(build(config)), exact=False, max_context=64)
