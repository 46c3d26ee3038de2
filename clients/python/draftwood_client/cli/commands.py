"""The commands with a single request: complete, info, tokenize, detokenize, audit."""

from __future__ import annotations

import math
import re
import sys
from typing import Annotated, Any

import typer

from draftwood.admin.v1.audit_pb2 import GetAuditReportResponse
from draftwood.v1.generation_pb2 import GetModelInfoResponse
from draftwood_client.cli.answering import AsJson, ShowDrafts, Stats, write_answer
from draftwood_client.cli.options import ConnectionOptions, GenerationFlags, ServerOptions, command
from draftwood_client.cli.output import print_json, read_text
from draftwood_client.convert import plain
from draftwood_client.errors import ArgumentValueError
from draftwood_client.messages import ChatMessage


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
        values = _plain_info(client.model_info())
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
        print_json(plain(result))
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


_DEFAULTS = {
    **{"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0},
    **{"max_tokens": None, "min_tokens": 0},
}
"""Where the generation config of a model has none."""


def _plain_info(info: GetModelInfoResponse) -> dict[str, Any]:
    """All fields but limits of messages and memories; the generation defaults without their groups."""
    values, defaults = plain(info), info.generation_defaults
    for name in ("limits", "memory_max_bytes"):
        del values[name]
    given = plain(defaults.sampling) | plain(defaults.stop)
    values["generation_defaults"] = {
        **{name: default if given[name] is None else given[name] for name, default in _DEFAULTS.items()},
        **plain(defaults.constraints),
        "bad_words": [(*words.ids,) for words in defaults.constraints.bad_words],
    }
    return values


def _shown(value: object) -> str:
    """A value for people; of an object the fields that say something."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        fields = {name.replace("_", " "): _shown(part) for name, part in value.items() if part not in (None, "", [])}
        return ", ".join(f"{name} {text}" for name, text in fields.items())
    if isinstance(value, list) and any(isinstance(part, dict) for part in value):
        return "; ".join(map(_shown, value))
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value in (None, "") else str(value)


def _token_id(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ArgumentValueError("IDS", f"{word!r} is not a token id") from None


_SHOWN = 20
"""Differences that are printed; --json has all that the server keeps."""


@command
def audit(connection: ServerOptions, as_json: AsJson = False) -> None:
    """Show how many answers were decoded again without drafting, and which of them differ. For operators."""
    with connection.admin_client() as client:
        report = client.audit_report()
    if as_json:
        print_json(_as_json(report))
    else:
        _print_report(report)


_COUNTS = (
    "{strategy:<16} {arm:<12} {audited:>9,} {tokens:>12,} {differing:>10,} {ties:>7,} {dropped:>9,} {failed:>8,}"
    " {largest_margin:>10.1e}"
)
_DIFFERENCE = "{detect_time:<20} {tenant:<16} {request_id:<34} {strategy:<16} {position:>8} {margin:>9.1e}"


def _print_report(report: GetAuditReportResponse) -> None:
    rule = "the same bits are promised" if report.exact else f"ties are below {report.tie_bound:.1e}"
    typer.echo(f"{report.model}, {report.dtype}, {report.runner}; {report.share:.0%} of requests; {rule}")
    if report.engine_restarts:
        typer.echo(f"engine restarts: {report.engine_restarts}")
    row = "{:<16} {:<12} {:>9} {:>12} {:>10} {:>7} {:>9} {:>8} {:>10}"
    typer.echo(
        row.format("strategy", "arm", "audited", "tokens", "differing", "ties", "dropped", "failed", "max margin")
    )
    for counts in report.counts:
        typer.echo(_COUNTS.format_map(plain(counts)))
    if not report.differences:
        return
    row = "{:<20} {:<16} {:<34} {:<16} {:>8} {:>9} {}"
    typer.echo("\n" + row.format("time (UTC)", "tenant", "request", "strategy", "token", "margin", ""))
    for difference in report.differences[:_SHOWN]:
        values = plain(difference) | {"detect_time": f"{difference.detect_time.ToDatetime():%Y-%m-%d %H:%M:%S}"}
        typer.echo(f"{_DIFFERENCE.format_map(values)} {'tie' if difference.tie else 'DEFECT'}")


def _as_json(report: GetAuditReportResponse) -> dict[str, Any]:
    """All fields; times in ISO 8601, an infinite margin as null, which JSON has no number for."""
    values = plain(report)
    for difference in values["differences"]:
        difference["detect_time"] = difference["detect_time"].isoformat()
        difference["margin"] = _finite(difference["margin"])
    for counts in values["counts"]:
        counts["largest_margin"] = _finite(counts["largest_margin"])
    return values


def _finite(margin: float) -> float | None:
    return margin if math.isfinite(margin) else None
