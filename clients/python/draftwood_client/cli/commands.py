"""The commands with a single request: generate, info, tokenize, detokenize."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from draftwood_client.cli.options import ConnectionOptions, GenerationFlags, command, or_content
from draftwood_client.cli.output import AnswerWriter, completion_as_json, print_json, print_stats, read_text
from draftwood_client.cli.tools import Calls, CallWriter, read_tools
from draftwood_client.client import Client
from draftwood_client.errors import ArgumentValueError
from draftwood_client.request import ChatMessage, GenerateOptions, Prompt

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
ShowDrafts = Annotated[bool, typer.Option("--show-drafts", help="Colour the tokens that were accepted from drafts.")]
Stats = Annotated[bool, typer.Option("--stats", help="Print drafting statistics to stderr.")]
System = Annotated[str | None, typer.Option("--system", help="System message at the start of the conversation.")]


@command
def generate(
    connection: ConnectionOptions,
    flags: GenerationFlags,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; read from stdin if it is '-' or missing.")] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Answer the prompt as a chat message, or continue it as it is. Default: --chat if the model has a"
            " chat template.",
            show_default=False,
        ),
    ] = None,
    system: System = None,
    tools: Annotated[
        str | None,
        typer.Option(
            "--tools",
            help="Functions that the model may call: a JSON list as in OpenAI's API; @FILE reads it. Each call is"
            " printed as a line of JSON.",
        ),
    ] = None,
    show_drafts: ShowDrafts = False,
    stats: Stats = False,
    as_json: AsJson = False,
) -> None:
    """Answer a question, or continue a text. The answer is streamed to stdout."""
    text = read_text(prompt, "PROMPT")
    for flag, given in (("--system", system), ("--tools", tools)):
        if given is not None and chat is False:
            raise ArgumentValueError(flag, "cannot be used with --raw")
    functions = None if tools is None else read_tools(or_content("--tools", tools))
    if functions and show_drafts and not as_json:
        raise ArgumentValueError("--show-drafts", "cannot be used with --tools")
    with connection.client() as client:
        calls = None if functions is None else Calls(client, functions)
        messages = _prompt(client, text, True if functions else chat, system)
        writer = AnswerWriter(show_drafts) if calls is None else CallWriter(calls.reader())
        details = writer.needs_details or (as_json and show_drafts)
        options: GenerateOptions = {**flags.options(), "token_details": details, "tools": functions}
        with client.stream(messages, **options) as stream:
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
        writer.write_samples([one if calls is None else calls.shown(one) for one in completion.samples])
    if stats:
        print_stats(completion)


@command
def info(connection: ConnectionOptions, as_json: AsJson = False) -> None:
    """Show the served model, its limits and the strategies."""
    with connection.client() as client:
        values = asdict(client.model_info())
    if as_json:
        print_json(values)
        return
    for name, value in values.items():
        shown = ", ".join(map(str, value)) if isinstance(value, tuple) else f"{value:,}" if _counts(value) else value
        typer.echo(f"{name.replace('_', ' '):<22}{shown}")


@command
def tokenize(
    connection: ConnectionOptions,
    text: Annotated[str | None, typer.Argument(help="The text; read from stdin if it is '-' or missing.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Apply the chat template, with the text as the user's message.")
    ] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="Print one token per line, with its text.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the token ids of a text."""
    source = read_text(text, "TEXT")
    with connection.client() as client:
        result = client.tokenize([ChatMessage("user", source)] if chat else source)
    if as_json:
        print_json(asdict(result))
    elif tokens:
        for token_id, token in zip(result.token_ids, result.tokens, strict=True):
            typer.echo(f"{token_id}\t{token!r}")
    else:
        typer.echo(" ".join(map(str, result.token_ids)))


@command
def detokenize(
    connection: ConnectionOptions,
    ids: Annotated[
        list[str] | None, typer.Argument(help="Token ids; read from stdin if they are '-' or missing.")
    ] = None,
    special: Annotated[bool, typer.Option("--special", help="Include special tokens.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the text of token ids."""
    text = read_text(" ".join(ids) if ids else None, "IDS")
    words = re.split(r"[\s,]+", text.strip(" \t\r\n[]"))
    numbers = [_token_id(word) for word in words if word]
    with connection.client() as client:
        result = client.detokenize(numbers, include_special_tokens=special)
    if as_json:
        print_json({"text": result})
    else:
        typer.echo(result, nl=sys.stdout.isatty())


def _prompt(client: Client, text: str, chat: bool | None, system: str | None) -> Prompt:
    if chat is None:
        chat = system is not None or client.model_info().has_chat_template
    if not chat:
        return text
    question = ChatMessage("user", text)
    return [question] if system is None else [ChatMessage("system", system), question]


def _counts(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _token_id(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ArgumentValueError("IDS", f"{word!r} is not a token id") from None
