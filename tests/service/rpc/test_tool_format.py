"""How a model writes calls of tools and reasoning, from its chat template."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from draftwood_model_runner.loading.model import BUNDLED_MODEL
from draftwood_model_runner.loading.tokenizer import Tokenizer
from draftwood_service.tools import (
    NoToolFormatError,
    ReasoningFormat,
    ToolFormat,
    reasoning_format_of,
    tool_format_of,
)
from tests.model_runner.loading import templates


def with_template(template: str, **special: Any) -> Tokenizer:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(BUNDLED_MODEL, **special)
    tokenizer.chat_template = template
    return Tokenizer(tokenizer)


CALLS_AS_TOKENS = {"additional_special_tokens": ["[TOOL_CALLS]"]}
BETWEEN = "\n</tool_call>\n<tool_call>\n"


@pytest.mark.parametrize(
    ("template", "special", "expected"),
    [
        (templates.HERMES, {}, ToolFormat("<tool_call>\n", "\n</tool_call>", BETWEEN, "name", "arguments")),
        (templates.LLAMA, {}, ToolFormat("", "", None, "name", "parameters")),
        (templates.MISTRAL, {}, ToolFormat("[TOOL_CALLS] [", "]", ", ", "name", "arguments")),
        # A special token is not in the text of an answer.
        (templates.MISTRAL, CALLS_AS_TOKENS, ToolFormat(" [", "]", ", ", "name", "arguments")),
    ],
)
def test_how_a_template_shows_calls(template: str, special: dict[str, Any], expected: ToolFormat) -> None:
    assert tool_format_of(with_template(template, **special)) == expected


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (templates.WITHOUT_TOOLS, "its chat template has no tools"),
        (templates.WITHOUT_RESULTS, "its chat template leaves out results of tools"),
        (templates.XML, "its chat template shows calls of tools as something else than JSON objects"),
        ("{{ raise_exception('never') }}", "its chat template refuses tools: never"),
        (templates.HERMES.replace("message.tool_calls", "nothing"), "shows calls of tools as something else"),
    ],
)
def test_templates_without_tools_that_can_be_read(template: str, reason: str) -> None:
    found = tool_format_of(with_template(template))
    assert isinstance(found, NoToolFormatError)
    assert reason in str(found)


def test_tools_and_calls_are_in_the_prompt() -> None:
    tokenizer = with_template(templates.HERMES)
    tools = [{"type": "function", "function": {"name": "track", "parameters": {"type": "object"}}}]
    call = {"type": "function", "id": "1", "function": {"name": "track", "arguments": {"order": 7}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Where is it?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "in Bremen", "tool_call_id": "1"},
    ]
    text = tokenizer.decode(tokenizer.encode_chat(messages, tools), include_special_tokens=True)
    assert '"name": "track"' in text.partition("</tools>")[0]
    assert '<tool_call>\n{"name": "track", "arguments": {"order": 7}}\n</tool_call>' in text
    assert "in Bremen" in text
    assert "<tools>" not in tokenizer.decode(tokenizer.encode_chat(messages[:1]))


SWITCHED = templates.HERMES.rstrip() + (
    "{%- if thinking is not defined %}{%- set thinking = false %}{%- endif %}"
    "{%- if add_generation_prompt and thinking %}{{- '<think>\\n' }}{%- endif %}"
    "{%- if false %}{% generation %}{{ strftime_now('%d') ~ bos_token ~ documents ~ reasoning_effort }}"
    "{% endgeneration %}{%- endif %}"
)


def test_variables_of_a_template_are_those_that_nobody_else_sets() -> None:
    tokenizer = with_template(SWITCHED)
    assert tokenizer.template_variables == {"thinking", "reasoning_effort"}
    assert with_template(templates.THINKING_ALWAYS).template_variables == frozenset()
    assert with_template("{% if %}").template_variables == frozenset()
    question = [{"role": "user", "content": "Where is it?"}]
    shown = tokenizer.decode(tokenizer.encode_chat(question, variables={"thinking": True}), include_special_tokens=True)
    assert shown == tokenizer.decode(tokenizer.encode_chat(question), include_special_tokens=True) + "<think>\n"


def test_a_variable_may_switch_reasoning_on() -> None:
    template = SWITCHED.replace("'<think>\\n'", "'<think>'").replace(
        "message.content", "message.content.split('</think>')[-1]"
    )
    assert reasoning_format_of(with_template(template)) is None
    assert reasoning_format_of(with_template(template), {"thinking": True}) == ReasoningFormat(
        "<think>", "</think>", True
    )


THINK_AS_TOKENS = {"additional_special_tokens": ["<think>", "</think>"]}
OPENS_OTHERS = templates.DROPPING.replace("'</think>' in content", "false")


@pytest.mark.parametrize(
    ("template", "special", "opened"),
    [
        (templates.THINKING, {}, False),
        (templates.THINKING_ALWAYS, {}, True),
        (templates.DROPPING, {}, True),
        (templates.THINKING, THINK_AS_TOKENS, None),  # which are not in the text of an answer
        (OPENS_OTHERS, {}, None),  # what it opens is no reasoning
        (templates.HERMES, {}, None),
        (templates.LLAMA, {}, None),
        ("{{ raise_exception('never') }}", {}, None),
    ],
)
def test_how_a_template_shows_reasoning(template: str, special: dict[str, Any], opened: bool | None) -> None:
    expected = None if opened is None else ReasoningFormat("<think>", "</think>", opened)
    assert reasoning_format_of(with_template(template, **special)) == expected
