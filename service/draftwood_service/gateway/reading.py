"""Requests of OpenAI's API as requests of ours.

A field that would change the answer and is not served is refused by name. One that nobody here knows, as each new
library brings some, is left out, and the answer says so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from draftwood_client import ChatMessage, GenerateOptions, Prompt, ToolFormat
from draftwood_service.gateway.errors import InvalidRequestError
from draftwood_service.gateway.tools import ParsedTools, options_for, read_calls, read_tools

MAX_PROMPTS = 128
"""Maximum number of prompts in a completions request."""
_COMMON = {"temperature", "top_p", "presence_penalty", "frequency_penalty", "n", "stop", "max_tokens"}
_COMMON |= {"top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "priority", "stop_token_ids"}  # of vLLM
"""Fields that have the same name in Draftwood's own API. The client checks the values."""
_KNOWN = {"model", "stream", "stream_options", "user", "metadata", "store", "service_tier", "prediction"}
_KNOWN |= {"prompt_cache_key", "safety_identifier", "draftwood", "seed", "logit_bias", "logprobs"}
_KNOWN |= {"response_format", "max_completion_tokens"}
_OF_CHAT = {"messages", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls"}
_OF_CHAT |= {"chat_template_kwargs", "reasoning_effort"}
_FIELDS: dict[str, set[str]] = {
    "stream_options": {"include_usage", "include_obfuscation"},
    "response_format": {"type", "json_schema", "pattern", "grammar"},
    "response_format.json_schema": {"name", "description", "schema", "strict"},
    "messages": {
        "role",
        "content",
        "name",
        "tool_calls",
        "tool_call_id",
        "refusal",
        "annotations",
        "reasoning_content",
    },
    "messages.content": {"type", "text"},
    "messages.tool_calls": {"id", "type", "function", "index"},
    "messages.tool_calls.function": {"name", "arguments"},
    "tools": {"type", "function"},
    "tools.function": {"name", "description", "parameters", "strict"},
}
"""By the path of an object, or of the objects in a list, the fields that are known there."""
_REFUSED: dict[str, tuple[object, ...]] = {
    # With the values that ask for nothing.
    "functions": ([],), "function_call": ("none", "auto"), "echo": (False,), "suffix": ("",), "best_of": (1,),
    "modalities": (["text"],), "verbosity": ("medium",), "audio": (), "web_search_options": (),
    # Of vLLM:
    "use_beam_search": (False,), "prompt_logprobs": (), "structured_outputs": (), "guided_json": (),
    "guided_regex": (), "guided_choice": (), "guided_grammar": (), "bad_words": ([],), "allowed_token_ids": ([],),
    "truncate_prompt_tokens": (), "chat_template": (), "logits_processors": ([],),
    "continue_final_message": (False,), "add_generation_prompt": (True,),
}  # fmt: skip
"""Fields that are not served, and without which the answer would be another one."""
_DRAFTWOOD = {"drafting", "learn", "strategy", "max_draft_nodes", "tenant", "session"}
_DETAILS = {"token_details", "draft_trees"}
THINKING = ("enable_thinking", "thinking")
"""Variables of chat templates that switch thoughts on and off."""
_MAX_LOGPROBS, _MAX_STOPS = 20, 16
"""As the service has them."""


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request, read.

    Attributes:
        prompts: one for chat; for completions, each is a request of its own.
        options: of each of them, without those that tools need, see `with_tools`.
        tools: what the model may call.
        logprobs: the answer has log-probabilities; so many alternatives.
        caller_names: fields that have several names, and the one that the caller wrote.
        ignored: paths of fields that nobody here knows.
        variables: of the chat template, see `with_variables`: the value of each, and the caller's field.
        echo: fields of the request that the answer repeats.
    """

    chat: bool
    model: str
    prompts: list[Prompt]
    options: GenerateOptions
    stream: bool
    tools: ParsedTools | None = None
    include_usage: bool = False
    logprobs: int | None = None
    samples: int = 1
    caller_names: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    variables: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    echo: Mapping[str, Any] = field(default_factory=dict)


def read_chat(body: Any) -> ParsedRequest:
    """`POST /v1/chat/completions`. Raises InvalidRequestError."""
    fields = object_of("body", body)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequestError("messages", "must be a list with at least one message")
    prompt = [_message(f"messages[{at}]", message) for at, message in enumerate(messages)]
    logprobs = None
    if given_as(fields, "logprobs", bool, "true or false"):
        logprobs = given_as(fields, "top_logprobs", int, "an integer") or 0
    elif fields.get("top_logprobs") is not None:
        raise InvalidRequestError("top_logprobs", "needs logprobs to be true")
    return of_chat(fields, prompt, _ignored(fields, True), logprobs)


def of_chat(
    fields: Mapping[str, Any], prompt: list[ChatMessage], ignored: tuple[str, ...], logprobs: int | None = None
) -> ParsedRequest:
    """A request of a chat, whose fields have the names of `POST /v1/chat/completions`.

    Args:
        prompt: its messages.
        ignored, logprobs: of the parsed request.

    Raises:
        InvalidRequestError: names the field.
    """
    tools = read_tools(fields)
    parsed = _parsed(fields, [prompt], ignored, chat=True, logprobs=logprobs)
    if tools is not None and ("regex" in parsed.options or "lark" in parsed.options):
        problem = "regex and lark cannot be combined with tools; use a JSON schema, or set tool_choice to none"
        raise InvalidRequestError("response_format.type", problem)
    return replace(parsed, tools=tools, variables=_variables(fields))


def _variables(fields: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """See `ParsedRequest.variables`. An effort of "none" is one without thoughts, which templates have a switch for."""
    variables: dict[str, tuple[Any, str]] = {}
    if effort := given_as(fields, "reasoning_effort", str, "a text"):
        variables["reasoning_effort"] = effort, "reasoning_effort"
        if effort == "none":
            variables |= dict.fromkeys(THINKING, (False, "reasoning_effort"))
    given = object_of("chat_template_kwargs", fields.get("chat_template_kwargs") or {})
    return variables | {name: (value, f"chat_template_kwargs.{name}") for name, value in given.items()}


def with_variables(parsed: ParsedRequest, known: Collection[str]) -> ParsedRequest:
    """The request as the service takes it, for a model whose template reads these variables. What sets none of them is
    left out."""
    kept = {name: value for name, (value, _) in parsed.variables.items() if name in known}
    served = {parsed.variables[name][1] for name in kept}
    left = dict.fromkeys(path for _, path in parsed.variables.values() if path not in served)
    options = cast(GenerateOptions, {**parsed.options, **({"template_kwargs": kept} if kept else {})})
    return replace(parsed, options=options, ignored=(*parsed.ignored, *left))


def with_tools(parsed: ParsedRequest, form: ToolFormat) -> ParsedRequest:
    """The request as the service takes it, for a model that writes calls in this form."""
    assert parsed.tools is not None
    options: dict[str, Any] = {**parsed.options, "tools": parsed.tools.tools}
    more = options_for(parsed.tools, form, options.pop("json_schema", None))
    if "stop" in more:
        given = options.get("stop") or []
        stops = [*(given if isinstance(given, list) else [given]), *more["stop"]]
        if len(stops) > _MAX_STOPS:  # only the caller's: what follows the first call is read and left out
            del more["stop"]
        else:
            more["stop"] = stops
    return replace(parsed, options=cast(GenerateOptions, options | more))


def read_completion(body: Any) -> ParsedRequest:
    """`POST /v1/completions`. Raises InvalidRequestError."""
    fields = object_of("body", body)
    prompts, logprobs = _prompts(fields.get("prompt")), given_as(fields, "logprobs", int, "an integer")
    return _parsed(fields, prompts, _ignored(fields, False), chat=False, logprobs=logprobs)


def _parsed(
    fields: Mapping[str, Any], prompts: list[Prompt], ignored: tuple[str, ...], *, chat: bool, logprobs: int | None
) -> ParsedRequest:
    if logprobs is not None and not 0 <= logprobs <= _MAX_LOGPROBS:
        raise InvalidRequestError("top_logprobs" if chat else "logprobs", f"must lie in [0, {_MAX_LOGPROBS}]")
    extensions = object_of("draftwood", fields.get("draftwood") or {})
    if unknown := extensions.keys() - _DRAFTWOOD - _DETAILS:
        known = ", ".join(sorted(_DRAFTWOOD | _DETAILS))
        raise InvalidRequestError(f"draftwood.{min(unknown)}", f"is unknown; there are {known}")
    options: dict[str, Any] = {name: extensions[name] for name in extensions if name not in _DETAILS}
    options |= {name: value for name, value in fields.items() if name in _COMMON and value is not None}
    options |= _renamed(fields)
    samples = given_as(fields, "n", int, "an integer") or 1
    if model := fields.get("model"):
        options["model"] = model
    stream = bool(given_as(fields, "stream", bool, "true or false"))
    stream_options = object_of("stream_options", fields.get("stream_options") or {})
    if stream_options and not stream:
        raise InvalidRequestError("stream_options", "needs stream to be true")
    if logprobs is not None:
        options["top_logprobs"] = logprobs
    options |= {name: True for name in _DETAILS if extensions.get(name) is True}
    if "draft_trees" in options and not stream:
        raise InvalidRequestError("draftwood.draft_trees", "needs stream to be true")
    if isinstance(fields.get("user"), str) and "session" not in options:
        options["session"] = fields["user"]
    return ParsedRequest(
        chat=chat,
        model=options.get("model", ""),
        prompts=prompts,
        options=cast(GenerateOptions, options),
        stream=stream,
        include_usage=stream_options.get("include_usage") is True,
        logprobs=logprobs,
        samples=samples,
        caller_names=_caller_names(fields, chat),
        ignored=ignored,
    )


def _caller_names(fields: Mapping[str, Any], chat: bool) -> dict[str, str]:
    names = {"prompt": "messages"} if chat else {"top_logprobs": "logprobs"}
    if fields.get("max_completion_tokens") is not None:
        names["max_tokens"] = "max_completion_tokens"
    if (fields.get("draftwood") or {}).get("session") is None and fields.get("user") is not None:
        names["draftwood.session"] = "user"
    return names


def _renamed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields with another name or form in Draftwood's own API."""
    options: dict[str, Any] = {}
    if (tokens := fields.get("max_completion_tokens")) is not None:
        options["max_tokens"] = tokens
    if fields.get("top_k") == -1:
        options["top_k"] = 0  # as vLLM has it
    if (seed := given_as(fields, "seed", int, "an integer")) is not None:
        options["seed"] = seed % 2**64
    if (bias := fields.get("logit_bias")) is not None:
        try:
            options["logit_bias"] = {int(token): value for token, value in object_of("logit_bias", bias).items()}
        except ValueError:
            raise InvalidRequestError("logit_bias", "has a key that is not a token id") from None
    if (form := fields.get("response_format")) is not None:
        options |= _format(object_of("response_format", form))
    return options


def _format(form: Mapping[str, Any]) -> dict[str, Any]:
    match form.get("type"):
        case "text":
            return {}
        case "json_object":
            return {"json_schema": {"type": "object"}}
        case "json_schema":
            described = object_of("response_format.json_schema", form.get("json_schema"))
            return {"json_schema": object_of("response_format.json_schema.schema", described.get("schema"))}
        case "regex":
            return {"regex": form.get("pattern")}
        case "lark":
            return {"lark": form.get("grammar")}
    raise InvalidRequestError("response_format.type", "must be text, json_object, json_schema, regex or lark")


def _message(name: str, message: Any) -> ChatMessage:
    fields = object_of(name, message)
    role = fields.get("role", "")
    for key in ("function_call", "audio"):
        if fields.get(key):
            raise InvalidRequestError(f"{name}.{key}", "is not served")
    if role == "function":
        raise InvalidRequestError(f"{name}.role", "function is not served; use tool")
    calls = read_calls(f"{name}.tool_calls", fields.get("tool_calls") or [])
    of_tool = [fields.get(key) or "" for key in ("tool_call_id", "name")] if role == "tool" else []
    content = text_of(f"{name}.content", fields.get("content"), {"text": "text"})
    thoughts = (fields.get("reasoning_content") or "") if role == "assistant" else ""
    tool_call_id, tool_name = of_tool or ("", "")
    return ChatMessage(
        "system" if role == "developer" else role, content, calls, tool_call_id, tool_name, reasoning=thoughts
    )


def text_of(name: str, content: Any, kinds: Mapping[str, str]) -> str:
    """The text of a message's content, a text or a list of parts.

    Args:
        kinds: types of parts, and the field of each that has its text.

    Raises:
        InvalidRequestError: it is neither, or has another part.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(name, "must be a text or a list of parts")
    texts = []
    for at, part in enumerate(content):
        fields = object_of(f"{name}[{at}]", part)
        text = fields.get(kinds.get(str(fields.get("type")), ""))
        if not isinstance(text, str):
            problem = f"must be {' or '.join(kinds)}: other parts are not served"
            raise InvalidRequestError(f"{name}[{at}].type", problem)
        texts.append(text)
    return "".join(texts)


def _prompts(given: Any) -> list[Prompt]:
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        kinds = {*map(type, given)}
        if kinds == {int}:
            return [given]
        if kinds in ({str}, {list}) and len(given) > MAX_PROMPTS:
            raise InvalidRequestError("prompt", f"has {len(given)} prompts; at most {MAX_PROMPTS} are allowed")
        if kinds == {str} or (kinds == {list} and all({*map(type, ids)} == {int} for ids in given)):
            return given
    raise InvalidRequestError("prompt", "must be a text, token ids, or a list of one of them")


def _ignored(fields: Mapping[str, Any], chat: bool) -> tuple[str, ...]:
    known = {**_FIELDS, "": _COMMON | _KNOWN | (_OF_CHAT if chat else {"prompt"})}
    return unknown_fields(fields, known, _REFUSED)


def unknown_fields(
    fields: Mapping[str, Any], known: Mapping[str, set[str]], refused: Mapping[str, tuple[object, ...]]
) -> tuple[str, ...]:
    """Paths of the fields that are not known, each once.

    Args:
        known: by the path of an object, or of the objects in a list, the fields that are known there.
        refused: fields that are not served, with the values that ask for nothing.

    Raises:
        InvalidRequestError: a field is not served.
    """
    for name, neutral in refused.items():
        value = fields.get(name)
        if not (value is None or value in neutral):
            raise InvalidRequestError(name, "is not served")
    return tuple(dict.fromkeys(_unknown("", fields, {**known, "": known[""] | {*refused}})))


def _unknown(path: str, value: Any, known: Mapping[str, set[str]]) -> Iterator[str]:
    if isinstance(value, list):
        for part in value:
            yield from _unknown(path, part, known)
    elif isinstance(value, dict) and path in known:
        for name, part in value.items():
            inner = f"{path}.{name}" if path else name
            if part is not None and name not in known[path]:
                yield inner
            else:
                yield from _unknown(inner, part, known)


def object_of(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequestError(name, "must be an object")
    return value


def list_of(name: str, value: Any) -> list[Any]:
    """An empty one of None. Raises InvalidRequestError."""
    if not isinstance(value or [], list):
        raise InvalidRequestError(name, "must be a list")
    return value or []


def given_as(fields: Mapping[str, Any], name: str, kind: type, is_: str) -> Any:
    value = fields.get(name)
    if value is not None and type(value) is not kind:
        raise InvalidRequestError(name, f"must be {is_}")
    return value
