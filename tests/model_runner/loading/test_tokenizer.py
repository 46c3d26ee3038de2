"""Which tokenizer a model is loaded with."""

from __future__ import annotations

import functools
import json
import shutil
import traceback
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from draftwood_model_runner.errors import InvalidInputError
from draftwood_model_runner.loading.model import BUNDLED_MODEL
from draftwood_model_runner.loading.tokenizer import Tokenizer, load_tokenizer
from draftwood_service.tools import NoToolFormatError, tool_format_of
from tests.model_runner.loading.templates import HERMES, LLAMA


@pytest.mark.parametrize("name", [None, "GPT2Tokenizer"])
def test_another_process_loads_the_tokenizer_that_transformers_chose(name: str | None, tmp_path: Path) -> None:
    path = BUNDLED_MODEL
    if name is not None:
        path = str(shutil.copytree(BUNDLED_MODEL, tmp_path / "model"))
        config = tmp_path / "model" / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"tokenizer_class": name}))
    chosen = AutoTokenizer.from_pretrained(path)
    class_path = load_tokenizer(path).class_path
    assert class_path.endswith(f":{name or 'TokenizersBackend'}")
    ours = load_tokenizer(path, class_path)
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


@functools.cache
def bundled() -> Tokenizer:
    return load_tokenizer(BUNDLED_MODEL)


CONTENT = "what a user wrote"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ raise_exception('no ' ~ messages[0].role ~ ' here') }}", "no user here"),
        ("{{ raise_exception('Unknown role in ' ~ messages) }}", "TemplateError"),
        ("{{ messages[0].content / 2 }}", "TypeError"),
        ("{{ {}[messages[0].content].x }}", "UndefinedError"),
        ("{% for x in range(10 ** 9) %}{% endfor %}", "OverflowError"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{% macro again(x) %}{{ again(x) }}{% endmacro %}{{ again(messages) }}", "RecursionError"),
    ],
)
def test_a_template_that_fails_refuses_the_messages_and_shows_nothing_of_them(template: str, reason: str) -> None:
    tokenizer = bundled()
    tokenizer._tokenizer.chat_template = template
    with pytest.raises(InvalidInputError, match=rf"^chat.messages: the chat template .*: {reason}$") as raised:
        tokenizer.encode_chat([{"role": "user", "content": CONTENT}])
    assert CONTENT not in "".join(traceback.format_exception(raised.value))
    assert not tokenizer.takes_system
    assert isinstance(tool_format_of(tokenizer), NoToolFormatError)


PIECES = st.sampled_from(
    ["messages", "messages[0]", ".content", "['absent']", ".role", "tools", "0", "'x'", "none", "1.5", "range(3)", "x"]
)
OPERATORS = st.sampled_from(["+", "/", "~", "*", "**", "in", "<", "| tojson +", "| length -", "| sum +", "| join ~"])
STATEMENTS = st.sampled_from(
    [
        "{{{{ {} }}}}",
        "{{% for x in {} %}}{{{{ x }}}}{{% endfor %}}",
        "{{{{ raise_exception({}) }}}}",
        "{{% set x = {} %}}",
    ]
)


@given(st.lists(st.tuples(STATEMENTS, PIECES, OPERATORS, PIECES), min_size=1, max_size=4))
def test_any_template_gives_tokens_or_refuses_the_messages(parts: list[tuple[str, str, str, str]]) -> None:
    tokenizer = bundled()
    tokenizer._tokenizer.chat_template = "".join(one.format(" ".join(rest)) for one, *rest in parts)
    refusal = ""
    try:
        assert tokenizer.encode_chat([{"role": "user", "content": CONTENT}]).dtype == np.int32
    except InvalidInputError as error:
        refusal = "".join(traceback.format_exception(error))
    assert CONTENT not in refusal
    assert tokenizer.takes_system in (True, False)
