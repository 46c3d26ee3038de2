"""`draftwood memory`: inspect and manage tenants' learned memories."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from draftwood_client.cli.answering import AsJson
from draftwood_client.cli.apps import new_app
from draftwood_client.cli.memory_tables import statistics_tables
from draftwood_client.cli.options import ConnectionOptions, command
from draftwood_client.cli.output import print_json
from draftwood_client.errors import ArgumentValueError
from draftwood_client.memory import MemoryRecord

FORMAT = 1
"""Version of the export format: the value of `draftwood_memory` in the first line of a file."""
_TEXT_KEYS = ("text", "content", "answer", "output")
_DOCUMENT_CHARACTERS = 32_768
"""A plain text file is split into documents of about this length."""

app = new_app(no_args_is_help=True, help="Inspect and manage tenants' learned memories.")


@app.command("stats")
@command
def stats(connection: ConnectionOptions, as_json: AsJson = False) -> None:
    """Show statistics of the store and of all memories, or of one with --tenant."""
    with connection.memory_client() as client:
        found = client.statistics()
    if as_json:
        print_json(asdict(found))
    else:
        statistics_tables(found)


@app.command("warm")
@command
def warm(
    connection: ConnectionOptions,
    files: Annotated[list[Path], typer.Argument(help="Text files, or JSON lines with a text each; '-' is stdin.")],
) -> None:
    """Let a tenant's memory learn texts that its answers are likely to resemble. Requires --tenant."""
    _named_tenant(connection)
    with connection.memory_client() as client, _progress("texts") as progress:
        tokens = client.warm(_documents(files), progress=progress)
    typer.echo(f"{tokens:,} tokens")


@app.command("export")
@command
def export(
    connection: ConnectionOptions,
    file: Annotated[Path | None, typer.Argument(help="File to write; stdout by default.")] = None,
    arm: Annotated[str, typer.Option(help="The arm of an experiment.", show_default=False)] = "",
    text: Annotated[bool, typer.Option("--text/--no-text", help="Include the text of the tokens.")] = True,
) -> None:
    """Export a tenant's memory as JSON lines."""
    with connection.memory_client() as client:
        exported = client.export(arm=arm, text=text)
        with _output(file) as out:
            head = {"draftwood_memory": FORMAT, "model": exported.model, "fingerprint": exported.fingerprint}
            out.write(json.dumps(head) + "\n")
            count = 0
            for record in exported.records:
                line: dict[str, Any] = {"kind": record.kind, "token_ids": record.token_ids}
                out.write(json.dumps(line | ({"text": record.text} if text else {}), ensure_ascii=False) + "\n")
                count += 1
    if file is not None:
        typer.echo(f"{count:,} records")


@app.command("import")
@command
def import_file(
    connection: ConnectionOptions,
    file: Annotated[Path, typer.Argument(help="A file of `draftwood memory export`; '-' is stdin.")],
) -> None:
    """Add an exported memory to a tenant's memory. An export of another model is learned from its texts.
    Requires --tenant.
    """
    _named_tenant(connection)
    with connection.memory_client() as client, _progress("records") as progress:
        lines = _lines(file)
        head = _object(next(lines, (0, "{}")), file)
        if head.get("draftwood_memory") != FORMAT:
            raise ArgumentValueError(
                "FILE", f"{file} does not begin with the header of an exported memory of format {FORMAT}"
            )
        tokens = client.import_records(
            _records(lines, file), fingerprint=str(head.get("fingerprint", "")), progress=progress
        )
    typer.echo(f"{tokens:,} tokens")


@app.command("purge")
@command
def purge(
    connection: ConnectionOptions,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete a tenant's memory on all servers, of all models. Requires --tenant."""
    tenant = _named_tenant(connection)
    if not yes:
        typer.confirm(f"Delete the memory of tenant {tenant!r} on all servers?", abort=True)
    with connection.memory_client() as client:
        purged = client.purge(tenant)
    typer.echo(f"{purged.tokens:,} tokens forgotten")
    if purged.final_at is not None:
        at = f"{purged.final_at:%Y-%m-%d %H:%M:%S} UTC"
        typer.echo(f"servers without the store, or killed, were not asked; any that still runs has forgotten by {at}")


@app.command("orphans")
@command
def orphans(
    connection: ConnectionOptions,
    as_json: AsJson = False,
    purge: Annotated[bool, typer.Option("--purge", help="Delete them.")] = False,
    fingerprint: Annotated[str, typer.Option(help="With --purge: only those of this model.", show_default=False)] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Show the memories in the store that no server uses, of models that are not served or with other encryption."""
    with connection.memory_client() as client:
        if purge:
            if not yes:
                typer.confirm(f"Delete all memories that no server uses {fingerprint}?", abort=True)
            typer.echo(f"{client.purge_orphans(fingerprint):,} tokens forgotten")
            return
        found = client.orphans()
    if as_json:
        print_json({"memories": [asdict(one) for one in found]})
        return
    row = "{:<24} {:<18} {:>12} {:>12} {:>14}"
    typer.echo(row.format("tenant", "fingerprint", "tokens", "stored KiB", "unserved h"))
    for one in found:
        name = "(hidden)" if one.tenant is None else f"{one.tenant}/{one.arm}" if one.arm else one.tenant
        sizes = f"{one.tokens:,}", f"{one.stored_bytes / 1024:,.0f}", f"{one.unserved / 3600:,.1f}"
        typer.echo(row.format(name, one.fingerprint, *sizes))


def _named_tenant(connection: ConnectionOptions) -> str:
    """The tenant that a command changes, which must be named. Raises `ArgumentValueError`."""
    if connection.tenant is None:
        raise ArgumentValueError("--tenant", "must be given")
    return connection.tenant


def _documents(files: list[Path]) -> Iterator[str]:
    """The texts of files: one per JSON line, or pieces of whole lines of a text file."""
    for file in files:
        if file.suffix in (".jsonl", ".ndjson"):
            for line in _lines(file):
                value = _object(line, file)
                text = next((value[key] for key in _TEXT_KEYS if isinstance(value.get(key), str)), None)
                if text is None:
                    raise ArgumentValueError(
                        "FILE", f"{file}, line {line[0]}: none of {', '.join(_TEXT_KEYS)} is present"
                    )
                yield text
        else:
            yield from _pieces(file)


def _pieces(file: Path) -> Iterator[str]:
    piece: list[str] = []
    size = 0
    for _, line in _lines(file):
        piece.append(line)
        size += len(line)
        if size > _DOCUMENT_CHARACTERS:
            yield "\n".join(piece)
            piece, size = [], 0
    if size:
        yield "\n".join(piece)


def _records(lines: Iterator[tuple[int, str]], file: Path) -> Iterator[MemoryRecord]:
    for line in lines:
        value = _object(line, file)
        ids, text, kind = value.get("token_ids", []), value.get("text", ""), value.get("kind", "output")
        if not (isinstance(ids, list) and all(type(one) is int for one in ids) and isinstance(text, str)):
            raise ArgumentValueError("FILE", f"{file}, line {line[0]}: not a record")
        yield MemoryRecord(tuple(ids), text, str(kind))


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """(line number, line) of the lines that are not empty."""
    try:
        stream = sys.stdin if str(file) == "-" else file.open(encoding="utf-8")
        with stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield number, line.rstrip("\n")
    except OSError as error:
        raise ArgumentValueError("FILE", f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ArgumentValueError("FILE", f"{file} cannot be read: it is not UTF-8") from None


def _object(line: tuple[int, str], file: Path) -> dict[str, Any]:
    try:
        value = json.loads(line[1])
    except ValueError as error:
        raise ArgumentValueError("FILE", f"{file}, line {line[0]}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ArgumentValueError("FILE", f"{file}, line {line[0]}: not an object")
    return value


@contextmanager
def _output(file: Path | None) -> Iterator[TextIO]:
    if file is None:
        yield sys.stdout
        return
    part = file.with_name(file.name + ".part")
    try:
        with part.open("w", encoding="utf-8") as out:
            yield out
        part.replace(file)
    except OSError as error:
        raise ArgumentValueError("FILE", f"{file} cannot be written: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _progress(unit: str) -> Iterator[Callable[[int, int], None]]:
    """A progress line on stderr, if that is a terminal."""
    columns = (BarColumn(pulse_style="green"), TextColumn("{task.description}"))
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda count, tokens: bar.update(task, description=f"{count:,} {unit}, {tokens:,} tokens")
