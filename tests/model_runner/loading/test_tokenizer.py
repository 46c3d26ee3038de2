"""Which tokenizer a model is loaded with."""

from __future__ import annotations

from transformers import AutoTokenizer

from draftwood_model_runner.loading.model import BUNDLED_MODEL
from draftwood_model_runner.loading.tokenizer import load_tokenizer


def test_the_bundled_model_has_the_tokenizer_that_transformers_would_choose() -> None:
    chosen = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    ours = load_tokenizer(BUNDLED_MODEL)
    chat = [{"role": "user", "content": "Where is my order?"}]
    assert ours._tokenizer.backend_tokenizer.to_str() == chosen.backend_tokenizer.to_str()
    assert ours._tokenizer.special_tokens_map == chosen.special_tokens_map
    expected = chosen.apply_chat_template(chat, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(chat).tolist() == expected
