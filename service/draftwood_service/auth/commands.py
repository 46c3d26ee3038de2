"""`draftwood key`: makes, lists and revokes the API keys in the file that servers follow (--auth-file)."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from draftwood_client.cli.apps import new_app, run
from draftwood_model_runner.errors import DraftwoodError, InvalidInputError
from draftwood_service.auth.auth_file import KeyEntry, new_key, read, updated
from draftwood_service.auth.principal import Principal, Role

_UNITS = {"m": "minutes", "h": "hours", "d": "days"}
_USAGE_ERROR = 2

File = Annotated[Path, typer.Option("--file", envvar="DRAFTWOOD_AUTH_FILE", help="The server's --auth-file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]

app = new_app(
    no_args_is_help=True,
    help="Create, list and revoke API keys. Servers see a change of the file within two seconds.",
)


def key(args: list[str]) -> int:
    """The command `draftwood key`. Returns the exit status."""
    return run(app, args, "key", {DraftwoodError: _USAGE_ERROR})


@app.command()
def create(
    file: File,
    tenant: Annotated[
        str | None, typer.Option(help="Tenant of the key; operators need none.", show_default=False)
    ] = None,
    role: Annotated[str, typer.Option(help="caller, tenant-admin or operator.")] = Role.CALLER.label,
    expires: Annotated[str | None, typer.Option(help="Validity, such as 90d, 12h or 30m; none by default.")] = None,
    note: Annotated[str, typer.Option(help="For people: who uses the key.", show_default=False)] = "",
    as_json: AsJson = False,
) -> None:
    """Create a key, and print it. It is shown this once: the file has its hash."""
    known = Role.of(role)
    if known is None:
        raise InvalidInputError("role", role, f"must be one of {', '.join(role.label for role in Role)}")
    made, now = new_key(), datetime.now(UTC)
    Principal(made.id, known, tenant)  # raises if they do not fit
    entry = KeyEntry(
        id=made.id,
        tenant=tenant,
        role=known,
        sha256=made.sha256,
        created=now,
        expires=None if expires is None else now + _duration("expires", expires),
        note=note,
    )
    with updated(file) as keys:
        keys.append(entry)
    if as_json:
        typer.echo(json.dumps({"key": made.key, **_shown(entry)}))
        return
    typer.echo(f"{_described(entry)}. Keep it safe, it is not shown again:", err=True)
    typer.echo(made.key)


@app.command("list")
def list_keys(file: File, as_json: AsJson = False) -> None:
    """List the keys, without what they are."""
    entries = read(file).keys
    if as_json:
        typer.echo(json.dumps({"keys": [_shown(entry) for entry in entries]}))
        return
    table = Table("id", "tenant", "role", "created", "expires", "note")
    for entry in entries:
        expired = entry.expires is not None and entry.expires <= datetime.now(UTC)
        expires = "expired" if expired else f"{entry.expires:%Y-%m-%d %H:%M}" if entry.expires is not None else ""
        table.add_row(entry.id, entry.tenant, entry.role.label, f"{entry.created:%Y-%m-%d}", expires, entry.note)
    Console().print(table)


@app.command()
def revoke(
    file: File,
    key_id: Annotated[str, typer.Argument(metavar="ID", help="From `draftwood key list`.")],
    after: Annotated[
        str | None, typer.Option(help="Let it expire then, such as 24h, so that callers can change to a new key.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Delete a key, or let it expire soon. Calls that run are not ended."""
    with updated(file) as keys:
        index = next((index for index, entry in enumerate(keys) if entry.id == key_id), None)
        if index is None:
            raise InvalidInputError("ID", key_id, f"{file} has no such key")
        entry = keys.pop(index)
        if after is not None:
            expires = datetime.now(UTC) + _duration("after", after)
            entry = entry.model_copy(update={"expires": min(expires, entry.expires or expires)})
            keys.insert(index, entry)
    if as_json:
        typer.echo(json.dumps({"revoked": after is None, **_shown(entry)}))
    else:
        typer.echo(f"{_described(entry)}" if after is not None else f"key {key_id} is revoked")


def _duration(name: str, given: str) -> timedelta:
    form = re.fullmatch(r"(\d{1,5})([mhd])", given)
    if form is None:
        raise InvalidInputError(name, given, "must look like 90d, 12h or 30m")
    return timedelta(**{_UNITS[form[2]]: int(form[1])})


def _shown(entry: KeyEntry) -> dict[str, Any]:
    return entry.model_dump(exclude={"sha256"})


def _described(entry: KeyEntry) -> str:
    whose = f"tenant {entry.tenant}" if entry.tenant is not None else "all tenants"
    until = f", until {_shown(entry)['expires']}" if entry.expires is not None else ""
    return f"key {entry.id}: {entry.role.label} of {whose}{until}"
