"""The texts of a request: its prompt (text, chat messages with tools, or token ids), and the format of its answer.

Sizes are checked before anything else is done with them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

from draftwood.v1 import generation_pb2 as pb
from draftwood_model_runner.engine_config import Abilities
from draftwood_model_runner.errors import InvalidInputError, InvalidValueError
from draftwood_model_runner.request import Format, GrammarKind
from draftwood_service.errors import ContextLengthError, TooMuchTextError, UnsupportedByEngineError
from draftwood_service.serving import ServedModel, Serving
from draftwood_service.tools import NoToolFormatError, indentation, read_object
from draftwood_strategies.arrays import Int32Array

P = ParamSpec("P")
T = TypeVar("T")

MAX_ROLE_CHARACTERS = 64
MAX_TOOLS = 128
"""Maximum number of tools of a chat, and of calls of a message."""
MAX_TEMPLATE_KWARGS_CHARACTERS = 1024
"""Few, since a template may write a variable once for each message."""
MAX_GRAMMAR_CHARACTERS = 64 * 1024
_MAX_NAME_CHARACTERS = 256
_SYSTEM_END = "\n\n"
"""Between a system message and the user's, for templates without the role."""
_SHORT_TEXT = 8 * 1024
"""Characters that are tokenized on the event loop; longer texts go to a worker thread, and other streams continue."""
_THREADS = 2
"""The libraries compute without the interpreter's lock, so that more would take CPU time from the model."""
_WAITING, _WAITING_OF_TENANT = 64, 16
"""Calls that run or wait: of all tenants, and of one."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's tokens, int32[n], and the request's field that it came from."""

    field: str
    ids: Int32Array


async def read_prompt(
    request: pb.GenerateRequest | pb.TokenizeRequest, serving: Serving, text_executor: TextExecutor, tenant: str
) -> Prompt:
    """The prompt: text, chat messages or token ids. Sizes are checked before anything else is done with them.

    Raises:
        InvalidValueError: it is missing, empty or too long, or a token id or a message is wrong.
        TooMuchTextError: too many long texts wait already.
    """
    model = serving.model
    field = "input" if isinstance(request, pb.TokenizeRequest) else "prompt"
    match request.WhichOneof(field):
        case "text":
            prompt = Prompt("text", await _encode_text(request.text, serving, text_executor, tenant))
        case "chat":
            messages, tools, variables, characters = read_chat(request.chat, serving)
            given: dict[str, Any] = {
                name: value for name, value in (("tools", tools), ("variables", variables)) if value
            }
            encode = partial(model.tokenizer.encode_chat, **given)
            prompt = Prompt("chat.messages", await text_executor.encode(tenant, characters, encode, messages))
        case "token_ids":
            assert isinstance(request, pb.GenerateRequest)
            prompt = Prompt("token_ids.ids", _token_ids(request.token_ids.ids, model))
        case _:
            choices = "text and chat" if field == "input" else "text, token_ids and chat"
            raise InvalidInputError(field, None, f"one of {choices} must be set")
    if prompt.ids.size == 0:
        raise InvalidInputError(prompt.field, None, "must not be empty")
    return prompt


def prompt_too_long(field: str, tokens: int, model: ServedModel) -> ContextLengthError:
    """The error of a prompt that leaves no room for an answer."""
    problem = f"the prompt has {tokens} tokens; at most {model.max_context - 1} fit"
    return ContextLengthError(field, problem, model.max_context)


async def _encode_text(text: str, serving: Serving, text_executor: TextExecutor, tenant: str) -> Int32Array:
    if not text:
        raise InvalidInputError("text", None, "must not be empty")
    if len(text) > (limit := serving.max_prompt_characters):
        problem = f"must have at most {limit} characters; it has {len(text)}"
        raise ContextLengthError("text", problem, serving.model.max_context)
    return await text_executor.encode(tenant, len(text), serving.model.tokenizer.encode, text)


def _token_ids(given: SequenceOf[int], model: ServedModel) -> Int32Array:
    if len(given) >= model.max_context:
        raise prompt_too_long("token_ids.ids", len(given), model)
    ids = np.array(given, np.int32)
    require_in_vocabulary("token_ids.ids", ids, model.vocab_size)
    return ids


async def read_format(
    options: pb.OutputFormat, model: ServedModel, text_executor: TextExecutor, tenant: str
) -> Format | None:
    """The format that the answer must follow; tried in a worker thread, since a large grammar takes long.

    Raises:
        InvalidValueError: it cannot be compiled, or takes too much time or memory.
        TooMuchTextError: too many formats wait already.
    """
    kind = options.WhichOneof("format")
    if kind is None:
        if options.ByteSize():
            raise InvalidInputError(
                "format", None, "is of a kind that this server does not know; it must not be ignored"
            )
        return None
    text: str = getattr(options, kind)
    require_length(f"format.{kind}", text, MAX_GRAMMAR_CHARACTERS)
    checked = Format(GrammarKind(kind), text)
    _check_format(checked.kind, model.abilities)
    await text_executor.run(tenant, model.grammars.check, checked.kind, checked.text)
    return checked


def _check_format(kind: GrammarKind, abilities: Abilities) -> None:
    """Raises UnsupportedByEngineError if answers cannot follow formats of a kind."""
    if kind.value not in abilities.formats:
        known = ", ".join(abilities.formats) or "none"
        raise UnsupportedByEngineError(f"format.{kind.value}", None, abilities.engine, f"formats that it has: {known}")


class Conversation(NamedTuple):
    """Messages, tools and variables as chat templates take them.

    Attributes:
        characters: of all texts with JSON indented, and at least one for each message, call and tool.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]
    characters: int


def read_chat(chat: pb.Chat, serving: Serving) -> Conversation:
    """Raises InvalidValueError: a message, a call, a tool or a variable is wrong, or the model's template cannot show
    it."""
    count = len(chat.messages)
    if not count:
        raise InvalidInputError("chat.messages", None, "must not be empty")
    require_at_most("chat.messages", count, serving.settings.max_chat_messages, "messages")
    require_at_most("chat.tools", len(chat.tools), MAX_TOOLS, "tools")
    for index, message in enumerate(chat.messages):
        require_length(f"chat.messages[{index}].role", message.role, MAX_ROLE_CHARACTERS)
        calls = len(message.tool_calls)
        require_at_most(f"chat.messages[{index}].tool_calls", calls, MAX_TOOLS, "calls")
    characters = sum(_size_of_message(message) for message in chat.messages) + sum(map(_size_of_tool, chat.tools))
    _require_characters(characters, serving)
    tokenizer = serving.model.tokenizer
    if not tokenizer.has_chat_template:
        raise InvalidInputError("chat", None, "the model has no chat template; send text, as `draftwood complete` does")
    with_tools = next(_with_tools(chat), None)
    if with_tools is not None and isinstance(serving.model.tool_format, NoToolFormatError):
        raise InvalidInputError(with_tools, None, f"the model takes no tools: {serving.model.tool_format}")
    called = {call.id: call.name for message in chat.messages for call in message.tool_calls if call.id}
    messages = [_message(f"chat.messages[{index}]", message, called) for index, message in enumerate(chat.messages)]
    if not tokenizer.takes_system:
        messages = _with_system_in_user(messages)
    tools = [_tool(f"chat.tools[{index}]", tool) for index, tool in enumerate(chat.tools)]
    of_calls = [made["tool_calls"] for made in messages if "tool_calls" in made]
    variables = read_variables(chat, tokenizer.template_variables)
    characters += len(chat.template_kwargs) + sum(map(indentation, [*tools, *of_calls, variables]))
    _require_characters(characters, serving)
    return Conversation(messages, tools or None, variables, characters)


def read_variables(chat: pb.Chat, known: frozenset[str]) -> dict[str, Any]:
    """`template_kwargs`. Raises InvalidInputError if they are no object, are too long, or set what is not known."""
    if not chat.template_kwargs:
        return {}
    field = "chat.template_kwargs"
    require_length(field, chat.template_kwargs, MAX_TEMPLATE_KWARGS_CHARACTERS)
    variables = _object(field, chat.template_kwargs)
    if unknown := sorted(variables.keys() - known):
        there = f"there are {', '.join(sorted(known))}" if known else "there is none"
        raise InvalidInputError(field, None, f"{unknown[0]!r} is no variable of the model's chat template; {there}")
    return variables


def _with_tools(chat: pb.Chat) -> Iterator[str]:
    """Names of the fields that need a template with tools."""
    if chat.tools:
        yield "chat.tools"
    for index, message in enumerate(chat.messages):
        for name in ("tool_calls", "tool_call_id", "tool_name"):
            if getattr(message, name):
                yield f"chat.messages[{index}].{name}"
        if message.role == "tool":
            yield f"chat.messages[{index}].role"


def _size_of_message(message: pb.ChatMessage) -> int:
    size = 1 + len(message.reasoning) + len(message.tool_call_id) + len(message.tool_name)
    size += sum(1 + len(part.text) for part in message.content)
    return size + sum(1 + len(call.id) + len(call.name) + len(call.arguments) for call in message.tool_calls)


def _size_of_tool(tool: pb.Tool) -> int:
    return 1 + len(tool.name) + len(tool.description) + len(tool.parameters)


def _message(field: str, message: pb.ChatMessage, called: Mapping[str, str]) -> dict[str, Any]:
    for index, part in enumerate(message.content):
        if part.WhichOneof("part") is None:
            raise InvalidInputError(f"{field}.content[{index}]", None, "must be a text: no other parts are served")
    read: dict[str, Any] = {"role": message.role, "content": "".join(part.text for part in message.content)}
    if message.reasoning:
        read["reasoning_content"] = message.reasoning
    if message.tool_calls:
        read["tool_calls"] = [
            _call(f"{field}.tool_calls[{index}]", call) for index, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id:
        read["tool_call_id"] = message.tool_call_id
    if name := message.tool_name or called.get(message.tool_call_id):
        read["name"] = name
    return read


def _with_system_in_user(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages for a chat template without the role system: the text of a system message goes before that of the
    next message of the user, an empty line apart; without one, it is a message of the user."""
    moved: list[dict[str, Any]] = []
    pending: list[str] = []
    for message in messages:
        if message["role"] == "system":
            pending.append(message["content"])
        elif message["role"] == "user":
            moved.append({**message, "content": _SYSTEM_END.join([*pending, message["content"]])})
            pending = []
        else:
            moved.append(message)
    return [*moved, {"role": "user", "content": _SYSTEM_END.join(pending)}] if pending else moved


def _call(field: str, call: pb.ToolCall) -> dict[str, Any]:
    require_length(f"{field}.name", call.name, _MAX_NAME_CHARACTERS)
    arguments = _object(f"{field}.arguments", call.arguments) if call.arguments else {}
    function = {"name": call.name, "arguments": arguments}
    return {"type": "function", "id": call.id, "function": function}


def _tool(field: str, tool: pb.Tool) -> dict[str, Any]:
    require_length(f"{field}.name", tool.name, _MAX_NAME_CHARACTERS)
    no_parameters = {"type": "object", "properties": {}}
    parameters = _object(f"{field}.parameters", tool.parameters) if tool.parameters else no_parameters
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def _object(field: str, text: str) -> dict[str, Any]:
    try:
        return read_object(text)
    except ValueError as error:
        raise InvalidInputError(field, None, str(error)) from None


def _require_characters(characters: int, serving: Serving) -> None:
    if characters > (limit := serving.max_prompt_characters):
        problem = f"must have at most {limit} characters with tools as indented JSON; it has {characters}"
        raise ContextLengthError("chat.messages", problem, serving.model.max_context)


def require_in_vocabulary(field: str, ids: Int32Array, vocab_size: int) -> None:
    """Raises InvalidValueError for the first token id, int32[n], outside of the model's vocabulary."""
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if outside.size:
        index = int(outside[0])
        allowed = f"it must lie in [0, {vocab_size - 1}], the model's vocabulary"
        raise InvalidValueError(f"{field}[{index}]", int(ids[index]), allowed)


def require_at_most(field: str, count: int, limit: int, what: str = "items") -> None:
    """Raises InvalidInputError."""
    if count > limit:
        raise InvalidInputError(field, None, f"has {count} {what}; at most {limit} are allowed")


def require_length(field: str, text: str, limit: int) -> None:
    """Raises InvalidInputError for an empty text, and one with more characters."""
    if not 1 <= len(text) <= limit:
        raise InvalidInputError(field, None, f"must have 1 to {limit} characters; it has {len(text)}")


class TextExecutor:
    """Runs tokenization or grammar checks off the event loop: few at once, one of a tenant, and few waiting.

    Used from one event loop.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="text")
        self._pending: Counter[str] = Counter()
        self._one_at_a_time: dict[str, asyncio.Semaphore] = {}

    async def run(self, tenant: str, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` returns, computed in a thread.

        A call that is cancelled while its work runs counts as pending until that ends. Calls of a tenant run one after
        the other, so that a slow one delays those of others by no more than one.

        Raises:
            TooMuchTextError: the tenant, or all together, have too many pending calls.
        """
        if self._pending[tenant] >= _WAITING_OF_TENANT or self._pending.total() >= _WAITING:
            raise TooMuchTextError(self._pending[tenant])
        self._pending[tenant] += 1
        try:
            await self._one_at_a_time.setdefault(tenant, asyncio.Semaphore(1)).acquire()
        except BaseException:
            self._left(tenant)
            raise
        future = self._threads.submit(work, *args, **kwargs)
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._ended, tenant))
        return await asyncio.wrap_future(future)

    async def encode(self, tenant: str, characters: int, encode: Callable[[T], Int32Array], text: T) -> Int32Array:
        """int32[n]: what `encode` makes of a text, or of messages; of a long one as `run` does."""
        return encode(text) if characters <= _SHORT_TEXT else await self.run(tenant, encode, text)

    def close(self) -> None:
        """Lets running work end, and starts no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ended(self, tenant: str) -> None:
        self._one_at_a_time[tenant].release()
        self._left(tenant)

    def _left(self, tenant: str) -> None:
        self._pending[tenant] -= 1
        if not self._pending[tenant]:
            del self._pending[tenant], self._one_at_a_time[tenant]
