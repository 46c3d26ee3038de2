"""How a model writes calls of tools and marks its reasoning, found from its own chat template; and the JSON in calls.

No file says it. But a template shows the model its earlier answers as it was trained to write them, so a conversation
with unmistakable calls and thoughts is rendered, and the form is what stands around them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

Render = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], str]
"""Messages and tools through a chat template, as they are before an answer. Raises whatever the template does."""
_NAMES = ("zq_first_tool", "zq_second_tool")
_ARGUMENTS = {"zq_argument": "zq value"}
_RESULT, _ANSWER, _THOUGHT = "zq result", "\u2020zq answer\u2021", "\u2020zq thought\u2021"
"""Answer and thought begin and end with characters that no template has."""
_OPENED = re.compile(r"(?:<(\w[\w:]*)>|\[(\w+)\])\s*\Z")
"""A marker at the end of a prompt, such as "<think>"."""
MAX_NESTING = 32
"""Objects and lists in one another. Templates indent tools: 100 KB in 300 levels are 60 MB of prompt."""
_TOO_DEEP = f"is nested too deeply; at most {MAX_NESTING} levels are allowed"


class ChatTokenizer(Protocol):
    """`draftwood_model_runner.loading.tokenizer.Tokenizer`, as far as the form of calls depends on it."""

    @property
    def has_chat_template(self) -> bool: ...
    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] = ...,
    ) -> str: ...
    def without_special_tokens(self, text: str) -> str: ...


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A call is `begin`, a JSON object with the name and the arguments, and `end`.

    Attributes:
        begin: before the first call, such as "<tool_call>\\n"; may be empty.
        end: after the last call.
        between: between two calls; None for a model that writes one call at most.
        name_key, arguments_key: keys of the object.
    """

    begin: str
    end: str
    between: str | None
    name_key: str
    arguments_key: str


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning is `begin`, what the model thinks, and `end`, at the start of an answer.

    Attributes:
        begin, end: such as "<think>" and "</think>", without white space around them.
        opened_by_prompt: the prompt ends with `begin`.
    """

    begin: str
    end: str
    opened_by_prompt: bool


class NoToolFormatError(Exception):
    """The model cannot be given tools, or its calls cannot be read; says why."""


def tool_format_of(tokenizer: ChatTokenizer) -> ToolFormat | NoToolFormatError:
    """How a model writes calls of tools, or why it is given none."""
    if not tokenizer.has_chat_template:
        return NoToolFormatError("it has no chat template")
    try:
        rendered = _read(tokenizer.render)
    except NoToolFormatError as error:
        return error
    # Special tokens are not in the text of an answer.
    begin, end = (tokenizer.without_special_tokens(text) for text in (rendered.begin, rendered.end))
    between = None if rendered.between is None else tokenizer.without_special_tokens(rendered.between)
    return ToolFormat(begin, end, between, rendered.name_key, rendered.arguments_key)


def is_marked(begin: str) -> bool:
    """Whether a call begins with a marker such as "<tool_call>", and not as any JSON or list does."""
    return any(character.isalnum() for character in begin)


def reasoning_format_of(
    tokenizer: ChatTokenizer, variables: Mapping[str, Any] = MappingProxyType({})
) -> ReasoningFormat | None:
    """How a model marks its reasoning with these variables of its chat template; None for one that writes none, or
    marks it with special tokens, which the text of an answer is without.

    A template tells it in one of two ways: it shows the reasoning of an earlier answer ("reasoning_content") between
    two markers, or it ends the prompt with the first marker and takes what an answer has before the second one out of
    it.
    """
    if not tokenizer.has_chat_template:
        return None
    question = {"role": "user", "content": "zq question"}

    def shown(answer: dict[str, Any]) -> str:
        return tokenizer.render(
            [question, {"role": "assistant", "content": _ANSWER, **answer}], None, variables=variables
        )

    try:
        prompt = tokenizer.render([question], None, add_generation_prompt=True, variables=variables)
        plain, thinking = shown({}), shown({"reasoning_content": _THOUGHT})
        opened = _OPENED.search(prompt)
        if _THOUGHT in thinking and thinking.find(_ANSWER) > thinking.find(_THOUGHT):
            at, answer = thinking.find(_THOUGHT), thinking.find(_ANSWER)
            begin = thinking[_in_common(plain, thinking) : at].strip() or (opened[0].strip() if opened else "")
            # A template may show empty reasoning in an answer without any: then both begin alike.
            begin = (_OPENED.search(thinking[:at]) or [begin])[0].strip()
            end = thinking[at + len(_THOUGHT) : answer].strip()
        elif opened is not None:
            begin = opened[0].strip()
            end = f"</{opened[1]}>" if opened[1] else f"[/{opened[2]}]"
            if _THOUGHT in shown({"content": f"{_THOUGHT}{end}{_ANSWER}"}):
                return None
        else:
            return None
    except Exception:  # of the template, which may do anything
        return None
    if not begin or not end or not all(tokenizer.without_special_tokens(mark) == mark for mark in (begin, end)):
        return None
    return ReasoningFormat(begin, end, prompt.rstrip().endswith(begin))


def _read(render: Render) -> ToolFormat:
    """The form in which a template shows calls.

    Raises:
        NoToolFormatError: the template leaves out tools, calls or results, or shows calls as something else than JSON.
    """

    def shown(what: str, *messages: dict[str, Any]) -> str:
        try:
            return render([{"role": "user", "content": "zq question"}, *messages], _tools())
        except Exception as error:
            raise NoToolFormatError(f"its chat template refuses {what}: {error}") from error

    if not all(name in shown("tools") for name in (*_NAMES, "zq_argument")):
        raise NoToolFormatError("its chat template has no tools")
    result = {"role": "tool", "name": _NAMES[0], "tool_call_id": _id(0), "content": _RESULT}
    if _RESULT not in shown("results of tools", calling(_NAMES[0]), result):
        raise NoToolFormatError("its chat template leaves out results of tools")
    once = shown("calls of tools", calling(_NAMES[0]))
    start, stop, name_key, arguments_key = _found_object(once, _NAMES[0])
    plain = shown("answers", {"role": "assistant", "content": _ANSWER})
    # The shared beginning and end of both are the frame of a message.
    before, after = _in_common(plain, once), _in_common(plain[::-1], once[::-1])
    before, after = min(before, plain.rfind(_ANSWER)), min(after, len(plain) - plain.rfind(_ANSWER) - len(_ANSWER))
    try:
        twice = shown("two calls", calling(*_NAMES))
        first, second = (_found_object(twice, name) for name in _NAMES)
        between: str | None = twice[first[1] : second[0]]
    except NoToolFormatError:
        between = None
    return ToolFormat(once[before:start], once[stop : len(once) - after], between, name_key, arguments_key)


def _in_common(first: str, second: str) -> int:
    """Characters that both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, pair in pairs if pair[0] != pair[1]), min(len(first), len(second)))


def calling(*names: str) -> dict[str, Any]:
    """A message of the assistant with calls, as chat templates take them."""
    calls = [
        {"type": "function", "id": _id(i), "function": {"name": name, "arguments": _ARGUMENTS}}
        for i, name in enumerate(names)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _id(call: int) -> str:
    return f"zq{call:07}"  # Mistral's templates want nine letters and digits


def _tools() -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {"zq_argument": {"type": "string", "description": "zq"}}}
    return [
        {"type": "function", "function": {"name": name, "description": "zq", "parameters": parameters}}
        for name in _NAMES
    ]


def _found_object(text: str, name: str) -> tuple[int, int, str, str]:
    """Where the last JSON object with a name and its arguments begins and ends, and the keys of these two."""
    decoder, at = json.JSONDecoder(), text.rfind(name)
    start = text.rfind("{", 0, max(at, 0))
    while start >= 0:
        try:
            decoded, stop = decoder.raw_decode(text, start)
        except ValueError:
            decoded, stop = {}, start
        names = [key for key, value in decoded.items() if value == name] if isinstance(decoded, dict) else []
        arguments = [key for key, value in decoded.items() if value == _ARGUMENTS] if names else []
        if names and arguments:
            return start, stop, names[0], arguments[0]
        start = text.rfind("{", 0, start)
    raise NoToolFormatError("its chat template shows calls of tools as something else than JSON objects")


def read_object(text: str) -> dict[str, Any]:
    """Raises ValueError, which says what is wrong."""
    try:
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError(f"must be a JSON object, not {type(value).__name__}")
        require_shallow(value)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"has the unpaired surrogate {error.object[error.start]!r}, which is not text") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    return value


def require_shallow(value: object) -> None:
    """Raises ValueError."""
    if any(level > MAX_NESTING for level, _ in _levels(value)):
        raise ValueError(_TOO_DEEP)


def indentation(value: object) -> int:
    """Characters of white space that templates add to JSON, at most."""
    return sum((4 * level + 1) * children for level, children in _levels(value))


def _levels(value: object) -> Iterator[tuple[int, int]]:
    """Each level of objects and lists, from 1, and the lines in it: items, and brackets that close."""
    level, containers = 0, [value]
    while containers := [container for container in containers if isinstance(container, dict | list)]:
        level += 1
        children = [
            child
            for container in containers
            for child in (container.values() if isinstance(container, dict) else container)
        ]
        yield level, len(children) + len(containers)
        containers = children
