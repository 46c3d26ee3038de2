"""Which tokenizer a model is loaded with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from draftwood_model_runner.loading.model import BUNDLED_MODEL
from draftwood_model_runner.loading.tokenizer import load_tokenizer
from tests.model_runner.loading.templates import HERMES, LLAMA


@pytest.mark.parametrize("name", [None, "GPT2Tokenizer"])
def test_another_process_loads_the_tokenizer_that_transformers_chose(name: str | None, tmp_path: Path) -> None:
    path = BUNDLED_MODEL
    if name is not None:
        path = str(shutil.copytree(BUNDLED_MODEL, tmp_path / "model"))
        config = tmp_path / "model" / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"tokenizer_class": name}))
    chosen = AutoTokenizer.from_pretrained(path)
    kind = load_tokenizer(path).kind
    assert kind.endswith(f":{name or 'TokenizersBackend'}")
    ours = load_tokenizer(path, kind)
    chat = [{"role": "user", "content": "Where is my order?"}]
    assert ours._tokenizer.backend_tokenizer.to_str() == chosen.backend_tokenizer.to_str()
    assert ours._tokenizer.special_tokens_map == chosen.special_tokens_map
    expected = chosen.apply_chat_template(chat, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(chat).tolist() == expected


IGNORES = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
REFUSES = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + IGNORES
)


@pytest.mark.parametrize(
    ("template", "takes"),
    [(HERMES, True), (LLAMA, True), (IGNORES, False), (REFUSES, False), (None, False), ("bundled", False)],
)
def test_whether_a_chat_template_takes_system_messages(template: str | None, takes: bool) -> None:
    tokenizer = load_tokenizer(BUNDLED_MODEL)
    if template != "bundled":
        tokenizer._tokenizer.chat_template = template
        tokenizer.has_chat_template = template is not None
    assert tokenizer.takes_system is takes
    if takes:
        ids = tokenizer.encode_chat([{"role": "system", "content": "be brief"}, {"role": "user", "content": "why"}])
        assert "be brief" in tokenizer.decode(ids)
