"""An answer, as `draftwood chat` and `complete` print it, and the tools of `chat --tools`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from draftwood.v1.generation_pb2 import Delta
from draftwood_client.cli.options import GenerationFlags
from draftwood_client.cli.output import AnswerWriter, completion_as_json, print_json, print_stats
from draftwood_client.client import Client
from draftwood_client.errors import ArgumentValueError
from draftwood_client.options import GenerateOptions
from draftwood_client.results import Sample
from draftwood_client.streams import GenerationStream
from draftwood_client.tools import Tool, ToolCall, ToolCallReader

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


class Calls:
    """Separates calls of tools from answers.

    Attributes:
        tools: what the model may call.

    Raises:
        ArgumentValueError: the model takes no tools.
    """

    def __init__(self, client: Client, tools: Sequence[Tool]) -> None:
        info = client.model_info()
        if not info.HasField("tool_format"):
            raise ArgumentValueError("--tools", f"{info.model} takes none: {info.no_tools_reason}")
        self.tools = tools
        self._form, self._names = info.tool_format, [tool.name for tool in tools]

    def reader(self) -> ToolCallReader:
        """Of a new answer."""
        return ToolCallReader(self._form, self._names)

    def shown(self, sample: Sample) -> Sample:
        """A sample with each call as a line."""
        pieces = self._pieces(sample.text)
        lines = [f"{_line(piece)}\n" if isinstance(piece, ToolCall) else piece for piece in pieces]
        return replace(sample, text="".join(lines).removesuffix("\n"))

    def separated(self, answer: dict[str, Any]) -> None:
        """Takes the calls out of the text of an answer as JSON, and of its samples."""
        for part in (answer, *answer.get("samples", ())):
            pieces = self._pieces(part["text"])
            part["text"] = "".join(piece for piece in pieces if isinstance(piece, str))
            part["tool_calls"] = [asdict(piece) for piece in pieces if isinstance(piece, ToolCall)]

    def _pieces(self, text: str) -> list[str | ToolCall]:
        reader = self.reader()
        return reader.push(text) + reader.close()


class CallWriter(AnswerWriter):
    """Writes an answer to stdout as it arrives, each call in it as a line."""

    def __init__(self, reader: ToolCallReader) -> None:
        super().__init__()
        self._reader = reader

    def write(self, delta: Delta) -> None:
        self._write_pieces(self._reader.push(delta.text))

    def end_line(self) -> None:
        self._write_pieces(self._reader.close())
        super().end_line()

    def _write_pieces(self, pieces: Sequence[str | ToolCall]) -> None:
        for piece in pieces:
            if isinstance(piece, str):
                self.write_text(piece)
            else:
                self.begin_line()
                self.write_text(f"{_line(piece)}\n")


def _line(call: ToolCall) -> str:
    """The arguments as the model wrote them; JSON has line ends between its parts only."""
    arguments = call.arguments.replace("\r", " ").replace("\n", " ")
    return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {arguments}}}'


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
    calls: Calls | None = None,
    show_drafts: bool,
    stats: bool,
    as_json: bool,
) -> None:
    """Sends a request, and writes its answer to stdout: as it comes, or when it is complete if it is JSON or several.

    Args:
        stream_of: the client's method.
        calls: separates calls of tools from the answer.

    Raises:
        DraftwoodError: the request failed.
    """
    if calls is not None and show_drafts and not as_json:
        raise ArgumentValueError("--show-drafts", "cannot be used with --tools")
    writer = AnswerWriter(show_drafts) if calls is None else CallWriter(calls.reader())
    options: GenerateOptions = {
        **flags.options(),
        "token_details": writer.needs_details or (as_json and show_drafts),
        "tools": None if calls is None else calls.tools,
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
        values = completion_as_json(completion)
        if calls is not None:
            calls.separated(values)
        print_json(values)
    elif completion.samples:
        writer.write_samples([sample if calls is None else calls.shown(sample) for sample in completion.samples])
    if stats:
        print_stats(completion)
