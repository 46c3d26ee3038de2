"""Models whose forward cannot select rows of logits: answers come from the last token, or the model is refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers as tf

from draftwood_model_runner.errors import UnsupportedModelError, UnsupportedRunnerError
from draftwood_model_runner.request import StopParams
from draftwood_model_runner.runners.shrinking import randomized
from tests.model_runner.families import VOCAB, taken_over
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.sequences import batch_of, engine_of, run

RUNNERS = ("torch", "openvino", "cuda")
NEW_TOKENS = 8
PROMPTS: tuple[tuple[int, ...], ...] = ((1, 2, 3, 1, 2), (4,), tuple(range(10, 50)))
_SIZES: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
_DECODER: dict[str, Any] = {**_SIZES, "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4}


def whisper() -> tf.WhisperConfig:
    encoder: dict[str, Any] = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64}
    starts: dict[str, Any] = {"decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None}
    return tf.WhisperConfig(**_DECODER, **encoder, **starts, decoder_ffn_dim=128, max_target_positions=128)


def musicgen() -> tf.MusicgenDecoderConfig:
    return tf.MusicgenDecoderConfig(
        **_SIZES, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, ffn_dim=128, num_codebooks=1
    )


def prophetnet() -> tf.ProphetNetConfig:
    heads: dict[str, Any] = {"num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4}
    layers: dict[str, Any] = {
        "num_encoder_layers": 1,
        "num_decoder_layers": 2,
        "is_decoder": True,
        "is_encoder_decoder": False,
    }
    return tf.ProphetNetConfig(**_SIZES, **heads, **layers, hidden_size=64, add_cross_attention=False)


def trocr() -> tf.TrOCRConfig:
    return tf.TrOCRConfig(**_DECODER, decoder_ffn_dim=128, max_position_embeddings=128)


def xlstm() -> tf.xLSTMConfig:
    return tf.xLSTMConfig(**_SIZES, hidden_size=64, num_hidden_layers=2, num_heads=4)


def module_of(model_class: Any, config: Any) -> Any:
    torch.manual_seed(0)
    return randomized(model_class(config).eval())


@functools.cache
def plainly(prompt: tuple[int, ...]) -> list[int]:
    """Greedy decoding with Whisper's decoder as transformers runs it."""
    module, tokens = module_of(tf.WhisperForCausalLM, whisper()), list(prompt)
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):
            tokens.append(int(module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("nodes", [0, 12])
@pytest.mark.parametrize("runner", RUNNERS)
def test_the_decoder_of_whisper_writes_what_transformers_computes(runner: str, nodes: int) -> None:
    model = taken_over(module_of(tf.WhisperForCausalLM, whisper()), runner=runner)
    strategy = OracleStrategy({prompt: plainly(prompt) for prompt in PROMPTS}, VOCAB, seed=1) if nodes else None
    sequences = batch_of(PROMPTS, StopParams(NEW_TOKENS), strategy=strategy, max_draft_nodes=nodes)
    run(engine_of(model, 12, max_running=3, prefill_chunk=16), *sequences)
    assert [one.output for one in sequences] == [plainly(prompt) for prompt in PROMPTS]
    assert not nodes or sum(one.stats.accepted_tokens for one in sequences) > 0


@pytest.mark.parametrize(
    ("runner", "model_class", "config", "reason"),
    [
        ("openvino", tf.MusicgenForCausalLM, musicgen, "positions of its own|rows of logits"),
        ("openvino", tf.TrOCRForCausalLM, trocr, "code of its own"),
        *[(runner, tf.ProphetNetForCausalLM, prophetnet, "code of its own") for runner in RUNNERS],
        *[(runner, tf.xLSTMForCausalLM, xlstm, "code of its own") for runner in RUNNERS],
    ],
)
def test_others_without_the_parameter_are_refused(runner: str, model_class: Any, config: Any, reason: str) -> None:
    with pytest.raises((UnsupportedModelError, UnsupportedRunnerError), match=reason):
        taken_over(module_of(model_class, config()), runner=runner)


class _KeepsAllRows(tf.LlamaForCausalLM):
    """Takes the parameter, and gives all rows."""

    def forward(self, *args: Any, logits_to_keep: Any = 0, **options: Any) -> Any:
        return super().forward(*args, **options)


class _KeepsFirstRows(tf.LlamaForCausalLM):
    """Takes the parameter, and gives the rows of other tokens."""

    def forward(self, *args: Any, logits_to_keep: Any = 0, **options: Any) -> Any:
        kept = logits_to_keep if isinstance(logits_to_keep, int) else torch.arange(logits_to_keep.shape[0])
        return super().forward(*args, logits_to_keep=kept, **options)


@pytest.mark.parametrize("model_class", [_KeepsAllRows, _KeepsFirstRows])
@pytest.mark.parametrize("runner", ["torch", "cuda"])
def test_a_model_that_gives_other_rows_is_refused(runner: str, model_class: Any) -> None:
    config = tf.LlamaConfig(**_SIZES, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=128)
    refused = UnsupportedModelError, UnsupportedRunnerError
    with pytest.raises(refused, match=r"rows of logits|differ from the model's"):
        taken_over(module_of(model_class, config), max_context=128, runner=runner)
