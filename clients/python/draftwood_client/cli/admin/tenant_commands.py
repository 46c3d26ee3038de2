"""`draftwood tenant`: the configuration of tenants. For operators."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from draftwood_client.cli.admin import changes
from draftwood_client.cli.admin.changes import DryRun, FileOption, RequiredFile, Yes
from draftwood_client.cli.admin.documents import Kind, Resources, ResourceT, definition_of, entries, read_file
from draftwood_client.cli.admin.fields import apply_setting
from draftwood_client.cli.admin.kinds import EXPERIMENT, TENANT
from draftwood_client.cli.admin.tables import tenants_table
from draftwood_client.cli.answering import AsJson
from draftwood_client.cli.apps import new_app
from draftwood_client.cli.options import FAILURE, ServerOptions, command, error_line
from draftwood_client.errors import ArgumentValueError, FailedPreconditionError, InvalidRequestError

Name = Annotated[str, typer.Argument(metavar="TENANT", help="The tenant, as in requests.")]
SETTINGS_HELP = "FIELD=VALUE, such as drafting.options.branch_length=8 or weight=2; null clears a field."

app = new_app(no_args_is_help=True, help="Show and change the configuration of tenants.")


@app.command("list")
@command
def list_tenants(server: ServerOptions, as_json: AsJson = False) -> None:
    """List the tenants that have a configuration."""
    with server.admin_client() as admin:
        changes.print_all(TENANT, admin.tenants, as_json, tenants_table)


@app.command("show")
@command
def show(server: ServerOptions, name: Name, as_json: AsJson = False) -> None:
    """Show a tenant as YAML that `apply` takes."""
    with server.admin_client() as admin:
        changes.show(TENANT, admin.tenants.get(name), as_json)


@app.command("create")
@command
def create(
    server: ServerOptions,
    name: Annotated[str | None, typer.Argument(metavar="[TENANT]", help="As in requests.", show_default=False)] = None,
    settings: Annotated[list[str] | None, typer.Argument(metavar="[FIELD=VALUE]...", help=SETTINGS_HELP)] = None,
    file: FileOption = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Give a tenant a configuration, from a file, from fields, or both."""
    fields = settings or []
    if file is not None and name and "=" in name:
        fields, name = [name, *fields], None
    tenant, definition = changes.file_entry(TENANT, file, name)
    for setting in fields:
        apply_setting(definition, TENANT.descriptor, setting, TENANT.hidden)
    with server.admin_client() as admin:
        changes.create(TENANT, admin.tenants, tenant, definition, dry_run, as_json)


@app.command("set")
@command
def set_fields(
    server: ServerOptions,
    name: Name,
    settings: Annotated[list[str], typer.Argument(metavar="FIELD=VALUE...", help=SETTINGS_HELP)],
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Change fields of a tenant; all others stay. A tenant without a configuration gets one."""
    with server.admin_client() as admin:
        changes.set_fields(TENANT, admin.tenants, name, settings, dry_run, as_json, create_missing=True)


@app.command("apply")
@command
def apply(server: ServerOptions, file: RequiredFile, dry_run: DryRun = False, as_json: AsJson = False) -> None:
    """Create or change tenants so that they are as in a file: one tenant, or a list under `tenants:`."""
    with server.admin_client() as admin:
        changes.apply(TENANT, admin.tenants, file, dry_run, as_json)


@app.command("edit")
@command
def edit(server: ServerOptions, name: Name) -> None:
    """Change a tenant in $VISUAL or $EDITOR."""
    with server.admin_client() as admin:
        changes.edit_one(TENANT, admin.tenants, name)


@app.command("delete")
@command
def delete(
    server: ServerOptions,
    name: Name,
    allow_missing: Annotated[bool, typer.Option("--allow-missing", help="No error if there is none.")] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Delete a tenant's configuration: it uses the settings of the servers again. Its memory stays."""
    with server.admin_client() as admin:
        question = f"Delete the configuration of tenant {name!r}?"
        changes.delete(TENANT, admin.tenants, name, question, allow_missing=allow_missing, dry_run=dry_run, yes=yes)


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


def _check(kind: Kind[ResourceT], resources: Resources[ResourceT], document: object, file: Path) -> int:
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
