"""One answer, as `draftwood chat` and `draftwood complete` print it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from draftwood_client.cli.options import GenerationFlags
from draftwood_client.cli.output import AnswerWriter, completion_as_json, print_json, print_stats
from draftwood_client.cli.tools import Calls, CallWriter
from draftwood_client.client import GenerationStream
from draftwood_client.errors import ArgumentValueError
from draftwood_client.options import GenerateOptions

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
        writer.write_samples([one if calls is None else calls.shown(one) for one in completion.samples])
    if stats:
        print_stats(completion)
