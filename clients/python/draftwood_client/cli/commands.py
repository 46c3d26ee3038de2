"""The commands with a single request: complete, info, tokenize, detokenize."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from draftwood_client.cli.answering import AsJson, ShowDrafts, Stats, write_answer
from draftwood_client.cli.options import ConnectionOptions, GenerationFlags, command
from draftwood_client.cli.output import print_json, read_text
from draftwood_client.errors import ArgumentValueError
from draftwood_client.protocol.request import ChatMessage


@command
def complete(
    connection: ConnectionOptions,
    flags: GenerationFlags,
    text: Annotated[str | None, typer.Argument(help="The text; read from stdin if it is '-' or missing.")] = None,
    show_drafts: ShowDrafts = False,
    stats: Stats = False,
    as_json: AsJson = False,
) -> None:
    """Continue a text as it is, without the model's chat template. The answer is streamed to stdout."""
    prompt = read_text(text, "TEXT")
    if not prompt:
        raise ArgumentValueError("TEXT", "is empty")
    with connection.client() as client:
        write_answer(client.stream_complete, prompt, flags, show_drafts=show_drafts, stats=stats, as_json=as_json)


@command
def info(connection: ConnectionOptions, as_json: AsJson = False) -> None:
    """Show the served model, its limits and the strategies."""
    with connection.client() as client:
        values = asdict(client.model_info())
    if as_json:
        print_json(values)
        return
    for name, value in values.items():
        typer.echo(f"{name.replace('_', ' '):<22}{_shown(value)}")


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


def _shown(value: object) -> str:
    """A value for people; of an object the fields that say something."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        fields = {name.replace("_", " "): _shown(one) for name, one in value.items() if one not in (None, "", ())}
        return ", ".join(f"{name} {text}" for name, text in fields.items())
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value in (None, "") else str(value)


def _token_id(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ArgumentValueError("IDS", f"{word!r} is not a token id") from None
