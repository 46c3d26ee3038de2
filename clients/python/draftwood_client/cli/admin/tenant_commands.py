"""`draftwood tenant`: the configuration of tenants. For operators."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated, Any

import typer

from draftwood_client.cli.admin.changes import Change, DryRun, FileOption, Group, file_entry
from draftwood_client.cli.admin.documents import (
    EXPERIMENT,
    TENANT,
    Kind,
    definition_of,
    entries,
    read_file,
)
from draftwood_client.cli.admin.fields import apply_setting
from draftwood_client.cli.admin.tables import tenants_table
from draftwood_client.cli.answering import AsJson
from draftwood_client.cli.apps import new_app
from draftwood_client.cli.options import FAILURE, ServerOptions, command, error_line
from draftwood_client.errors import ArgumentValueError, FailedPreconditionError, InvalidRequestError

GROUP = Group(
    TENANT,
    tenants_table,
    name="The tenant, as in requests.",
    setting="FIELD=VALUE, such as drafting.options.branch_length=8 or weight=2; null clears a field.",
    about_list="List the tenants that have a configuration.",
    about_set="Change fields of a tenant; all others stay. A tenant without a configuration gets one.",
    about_apply="Create or change tenants so that they are as in a file: one tenant, or a list under `tenants:`.",
    about_delete="Delete a tenant's configuration: it uses the settings of the servers again. Its memory stays.",
    question="Delete the configuration of tenant {name!r}?",
    set_creates=True,
)

app = new_app(no_args_is_help=True, help="Show and change the configuration of tenants.")


@command
def create(
    server: ServerOptions,
    name: Annotated[str | None, typer.Argument(metavar="[TENANT]", help="As in requests.", show_default=False)] = None,
    settings: Annotated[list[str] | None, typer.Argument(metavar="[FIELD=VALUE]...", help=GROUP.setting)] = None,
    file: FileOption = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Give a tenant a configuration, from a file, from fields, or both."""
    fields = settings or []
    if file is not None and name and "=" in name:
        fields, name = [name, *fields], None
    tenant, definition = file_entry(TENANT, file, name)
    for setting in fields:
        apply_setting(definition, TENANT.descriptor, setting, TENANT.hidden)
    with server.admin_client() as admin:
        Change(TENANT, admin.tenants, dry_run, as_json).create(tenant, definition)


GROUP.add_to(app, create)


@app.command("check")
@command
def check(
    server: ServerOptions,
    file: Annotated[Path, typer.Argument(help="A tenants file: YAML with the lists tenants and experiments.")],
) -> None:
    """Let the server check a tenants file, or one tenant, and change nothing."""
    document = read_file(file)
    with server.admin_client() as admin:
        problems = 0
        if not isinstance(document, dict) or "tenants" in document or "experiments" not in document:
            problems += _check(TENANT, admin.tenants, document, file)
        if isinstance(document, dict) and "experiments" in document:
            problems += _check(EXPERIMENT, admin.experiments, document, file)
    if problems:
        raise typer.Exit(FAILURE)


def _check(kind: Kind, resources: Any, document: object, file: Path) -> int:
    """The number of entries with a problem. Each is created under a name that is free, with `validate_only`."""
    seen: set[str] = set()
    problems = 0
    for place, entry in entries(document, kind, file):
        where = place or kind.noun
        try:
            name, definition = definition_of(entry, kind, place)
            if not name:
                raise ArgumentValueError("name", "must be set")
            if name in seen:
                raise ArgumentValueError("name", f"{name} is in the file twice")
            seen.add(name)
            free = f"check-{secrets.token_hex(16)}"
            resources.create(free, kind.resource(definition), validate_only=True)
        except (ArgumentValueError, InvalidRequestError, FailedPreconditionError) as error:
            said = error_line(error)
            typer.echo(said if said.startswith(where) else f"{where}: {said}", err=True)
            problems += 1
        else:
            typer.echo(f"{where} {name}: ok")
    return problems
