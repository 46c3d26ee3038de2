"""An answer, as `draftwood chat` and `complete` print it, and the tools of `chat --tools`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from draftwood_client.cli.options import GenerationFlags
from draftwood_client.cli.output import AnswerWriter, completion_as_json, print_json, print_stats
from draftwood_client.client import Client
from draftwood_client.errors import ArgumentValueError
from draftwood_client.messages import Tool
from draftwood_client.options import GenerateOptions
from draftwood_client.streams import GenerationStream

_KEYS = {"name", "description", "parameters"}


def read_tools(as_json: str) -> list[Tool]:
    """Tools of a JSON list, each as in OpenAI's API: the function, or an object of type "function" with it.

    Raises:
        ArgumentValueError: says which one is wrong.
    """
    try:
        given = json.loads(as_json)
    except (ValueError, RecursionError) as error:
        raise ArgumentValueError("--tools", f"is not JSON: {error}") from None
    if not isinstance(given, list) or not given:
        raise ArgumentValueError("--tools", "must be a JSON list of functions")
    return [_tool(f"--tools: entry {at}", tool) for at, tool in enumerate(given)]


def require_tools(client: Client) -> None:
    """Raises ArgumentValueError: the model takes no tools."""
    info = client.model_info()
    if not info.HasField("tool_format"):
        raise ArgumentValueError("--tools", f"{info.model} takes none: {info.no_tools_reason}")


def _tool(name: str, given: Any) -> Tool:
    function = given
    if isinstance(given, Mapping) and given.get("type") == "function":
        function = given.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ArgumentValueError(name, "must be an object with a name, a description and parameters")
    if unknown := sorted(function.keys() - _KEYS):
        raise ArgumentValueError(name, f"has the key {unknown[0]!r}; allowed are {', '.join(sorted(_KEYS))}")
    description, parameters = function.get("description", ""), function.get("parameters")
    if not isinstance(description, str):
        raise ArgumentValueError(name, "must have a text as its description")
    return Tool(function["name"], description, "" if parameters is None else json.dumps(parameters))


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
ShowDrafts = Annotated[bool, typer.Option("--show-drafts", help="Colour the tokens that were accepted from drafts.")]
Stats = Annotated[bool, typer.Option("--stats", help="Print drafting statistics to stderr.")]


def write_answer(
    stream_of: Callable[..., GenerationStream],
    prompt: Any,
    flags: GenerationFlags,
    *,
    tools: Sequence[Tool] | None = None,
    show_drafts: bool,
    stats: bool,
    as_json: bool,
) -> None:
    """Sends a request, and writes its answer to stdout: as it comes, or when it is complete if it is JSON or several.

    Args:
        stream_of: the client's method.
        tools: what the model may call.

    Raises:
        DraftwoodError: the request failed.
    """
    if tools is not None and show_drafts and not as_json:
        raise ArgumentValueError("--show-drafts", "cannot be used with --tools")
    writer = AnswerWriter(show_drafts)
    options: GenerateOptions = {
        **flags.options(),
        "token_details": writer.needs_details or (as_json and show_drafts),
        "raw_text": True if writer.needs_details and not as_json else None,
        "tools": tools,
    }
    with stream_of(prompt, **options) as stream:
        try:
            for delta in stream:
                if not (as_json or (flags.n or 1) > 1):
                    writer.write(delta)
        finally:
            writer.end_line()
        completion = stream.completion()
    if as_json:
        print_json(completion_as_json(completion))
    elif completion.samples:
        writer.write_samples(completion.samples)
    if stats:
        print_stats(completion)
