"""`draftwood memory`: inspect and manage tenants' learned memories."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from draftwood.v1 import memory_pb2 as pb
from draftwood_client.cli.admin.tables import cell, console, plain_table
from draftwood_client.cli.answering import AsJson
from draftwood_client.cli.apps import new_app
from draftwood_client.cli.options import ConnectionOptions, command
from draftwood_client.cli.output import print_json
from draftwood_client.convert import plain
from draftwood_client.errors import ArgumentError, ArgumentValueError
from draftwood_client.memory import MemoryRecord
from draftwood_client.request import text as checked_text
from draftwood_client.request import token_ids as checked_token_ids

FORMAT = 1
"""Version of the export format: the value of `draftwood_memory` in the first line of a file."""
_TEXT_KEYS = ("text", "content", "answer", "output")
_JSON_LINES = (".jsonl", ".ndjson")
_DOCUMENT_CHARACTERS = 32_768
"""A plain text file is split into documents of about this length."""

app = new_app(no_args_is_help=True, help="Inspect and manage tenants' learned memories.")


class FileFormat(StrEnum):
    """Of files with texts."""

    TEXT = "text"
    JSONL = "jsonl"


@app.command("stats")
@command
def stats(connection: ConnectionOptions, as_json: AsJson = False) -> None:
    """Show statistics of the store and of all memories, or of one with --tenant."""
    with connection.memory_client() as client:
        statistics = client.statistics()
    if as_json:
        values = plain(statistics)
        del values["next_page_token"]
        print_json(values)
    else:
        _print_statistics(statistics)


@app.command("warm")
@command
def warm(
    connection: ConnectionOptions,
    files: Annotated[list[Path], typer.Argument(help="Text files, or JSON lines with a text each; '-' is stdin.")],
    file_format: Annotated[
        FileFormat | None,
        typer.Option(
            "--format",
            help="Of all files. Without it, those named .jsonl or .ndjson are JSON lines, and others whose first line"
            " is a JSON object with a text.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Let a tenant's memory learn texts that its answers are likely to resemble. Requires --tenant."""
    _named_tenant(connection)
    with connection.memory_client() as client, _progress("texts") as progress:
        tokens = client.warm(_documents(files, file_format), progress=progress)
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
        tokens = client.import_records(_records(lines, file), fingerprint=_header(lines, file), progress=progress)
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
    if purged.HasField("final_time"):
        at = f"{purged.final_time.ToDatetime():%Y-%m-%d %H:%M:%S} UTC"
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
        memories = [plain(memory) for memory in client.orphans()]
    if as_json:
        print_json({"memories": memories})
        return
    row = "{:<24} {:<18} {:>12} {:>12} {:>14}"
    typer.echo(row.format("tenant", "fingerprint", "tokens", "stored KiB", "unserved h"))
    for memory in memories:
        tenant, arm = memory["tenant"], memory["arm"]
        name = "(hidden)" if tenant is None else f"{tenant}/{arm}" if arm else tenant
        sizes = f"{memory['stored_bytes'] / 1024:,.0f}", f"{memory['unserved_duration'] / 3600:,.1f}"
        typer.echo(row.format(name, memory["fingerprint"], f"{memory['tokens']:,}", *sizes))


def _named_tenant(connection: ConnectionOptions) -> str:
    """The tenant that a command changes, which must be named. Raises `ArgumentValueError`."""
    if connection.tenant is None:
        raise ArgumentValueError("--tenant", "must be given")
    return connection.tenant


def _documents(files: list[Path], file_format: FileFormat | None) -> Iterator[str]:
    """The texts of files: one per JSON line, or pieces of whole lines of a text file."""
    for file in files:
        lines = _lines(file)
        first = next(lines, (1, ""))
        chosen = file_format or _format_of(file, first[1])
        yield from (_texts if chosen is FileFormat.JSONL else _pieces)(chain([first], lines), file)


def _format_of(file: Path, first: str) -> FileFormat:
    """What a file holds, by its name and its first line."""
    if file.suffix.lower() in _JSON_LINES:
        return FileFormat.JSONL
    try:
        value = json.loads(first)
    except (ValueError, RecursionError):
        return FileFormat.TEXT
    return FileFormat.TEXT if _text_key(value) is None else FileFormat.JSONL


def _text_key(value: Any) -> str | None:
    """The key of a JSON line's text; None if there is none."""
    if not isinstance(value, dict):
        return None
    return next((key for key in _TEXT_KEYS if isinstance(value.get(key), str)), None)


def _texts(lines: Iterator[tuple[int, str]], file: Path) -> Iterator[str]:
    for number, line in lines:
        if line:
            with _at(file, number):
                value = _object(line)
                if (key := _text_key(value)) is None:
                    raise ArgumentValueError("line", f"none of {', '.join(_TEXT_KEYS)} is present")
                yield checked_text(key, value[key])


def _pieces(lines: Iterator[tuple[int, str]], file: Path) -> Iterator[str]:
    piece: list[str] = []
    size = 0
    for _, line in lines:
        piece.append(line)
        size += len(line)
        if size > _DOCUMENT_CHARACTERS:
            yield "\n".join(piece)
            piece, size = [], 0
    if size:
        yield "\n".join(piece)


def _header(lines: Iterator[tuple[int, str]], file: Path) -> str:
    """The fingerprint in the first line of an export."""
    number, line = next(lines, (1, "{}"))
    with _at(file, number):
        head = _object(line)
        if head.get("draftwood_memory") != FORMAT:
            raise ArgumentValueError("line", f"must be the header of an exported memory of format {FORMAT}")
        return checked_text("fingerprint", head.get("fingerprint", ""))


def _records(lines: Iterator[tuple[int, str]], file: Path) -> Iterator[MemoryRecord]:
    for number, line in lines:
        with _at(file, number):
            value = _object(line)
            ids = checked_token_ids("token_ids", value.get("token_ids", []))
            text = checked_text("text", value.get("text", ""))
        yield MemoryRecord(tuple(ids), text, str(value.get("kind", "output")))


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """(line number, line) of the lines that are not empty; a byte order mark belongs to none."""
    try:
        with nullcontext(sys.stdin.buffer) if str(file) == "-" else file.open("rb") as stream:
            for number, data in enumerate(stream, 1):
                with _at(file, number):
                    line = _decoded(data, "utf-8-sig" if number == 1 else "utf-8")
                if line.strip():
                    yield number, line.rstrip("\r\n")
    except OSError as error:
        raise ArgumentValueError("FILE", f"{file} cannot be read: {error.strerror}") from None


def _decoded(data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        problem = f"byte {error.start} of the line is {data[error.start]}, which is not UTF-8"
        raise ArgumentValueError("line", problem) from None


def _object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ArgumentValueError("line", f"not JSON ({error})") from None
    except RecursionError:
        raise ArgumentValueError("line", "nested too deeply") from None
    if not isinstance(value, dict):
        raise ArgumentValueError("line", f"must be a JSON object, not {type(value).__name__}")
    return value


@contextmanager
def _at(file: Path, number: int) -> Iterator[None]:
    """Errors name the line of the file, before the field in it."""
    try:
        yield
    except ArgumentError as error:
        field = "" if error.argument == "line" else f"{error.argument}: "
        raise ArgumentValueError("FILE", f"{file}, line {number}: {field}{error.args[1]}") from None


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


def _print_statistics(statistics: pb.GetMemoryStatisticsResponse) -> None:
    """A table of the memories and, for operators, one of the store."""
    right = ("tokens", "stored", "entries", "index in RAM")
    table = plain_table("tenant", "arm", *right, "", right=right)
    for memory in statistics.tenants:
        index = _size(memory.index_bytes) if memory.resident else "not loaded"
        counts = f"{memory.tokens:,}", _size(memory.stored_bytes), f"{memory.log_records:,}", index
        note = "read-only" if memory.read_only else ""
        table.add_row(*map(cell, [memory.tenant, memory.arm or "-", *counts, note]))
    to = console()
    to.print(table)
    count = len(statistics.tenants)
    noun = "memory" if count == 1 else "memories"
    to.print(f"{count:,} {noun} of the model with fingerprint {statistics.fingerprint}")
    if statistics.HasField("store"):
        to.print()
        store = plain_table("store", "", right=("",))
        for name, value in plain(statistics.store).items():
            store.add_row(*map(cell, _quantity(name, value)))
        to.print(store)


def _size(count: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:,.1f} {unit}"
    return f"{count} B"


def _quantity(name: str, value: Any) -> tuple[str, str]:
    """A field of the store's statistics: its name without the unit, and the value with it."""
    words = name.replace("_", " ")
    if isinstance(value, bool):
        return words, "yes" if value else "NO"
    if name.endswith("_bytes"):
        return words.removesuffix(" bytes"), _size(value)
    if name == "last_lag":
        return words, f"{1000 * (value or 0.0):,.0f} ms"
    return words, f"{value:,}" if isinstance(value, int) else str(value)
