"""What `draftwood tenant` and `draftwood experiment` do alike: show, create, set, apply and delete."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from draftwood_client.cli.admin.documents import (
    Kind,
    Resources,
    ResourceT,
    definition_of,
    entries,
    print_differences,
    print_resource,
    read_file,
)
from draftwood_client.cli.admin.editing import edit
from draftwood_client.cli.admin.fields import Data, apply_setting, changed_paths, mask_of
from draftwood_client.cli.output import print_json
from draftwood_client.errors import AbortedError, ArgumentValueError, NotFoundError

FileOption = Annotated[
    Path | None, typer.Option("--file", "-f", help="YAML or JSON file; '-' is stdin.", show_default=False)
]
RequiredFile = Annotated[Path, typer.Option("--file", "-f", help="YAML or JSON file; '-' is stdin.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Let the server check, show what would change; change nothing.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
_TRIES = 5
"""To change a resource that others change at the same time."""


def show(kind: Kind[ResourceT], resource: ResourceT, as_json: bool) -> None:
    if as_json:
        print_json(kind.data(resource))
    else:
        print_resource(kind, resource)


def file_entry(kind: Kind[ResourceT], file: Path | None, name: str | None) -> tuple[str, Data]:
    """Id and definition of the one resource in a file; an empty definition without a file.

    Raises:
        ArgumentValueError: the file is wrong, has several, or no name is given.
    """
    found, data = "", Data()
    if file is not None:
        several = entries(read_file(file), kind, file)
        if len(several) != 1:
            raise ArgumentValueError(str(file), f"has {len(several)} {kind.plural}; use `apply` for several")
        place, entry = several[0]
        found, data = definition_of(entry, kind, place)
    if name and found and name != found:
        raise ArgumentValueError("NAME", f"is {name}, and the file is of {found}")
    if not (name or found):
        raise ArgumentValueError("NAME", "must be given, as an argument or in the file")
    return name or found, data


def create(
    kind: Kind[ResourceT], resources: Resources[ResourceT], name: str, definition: Data, dry_run: bool, as_json: bool
) -> None:
    made = resources.create(name, kind.resource(definition, name), validate_only=dry_run)
    _tell(kind, name, "created", {}, made, dry_run, as_json)


def set_fields(
    kind: Kind[ResourceT],
    resources: Resources[ResourceT],
    name: str,
    settings: list[str],
    dry_run: bool,
    as_json: bool,
    *,
    create_missing: bool = False,
) -> None:
    """Reads the resource, since masks name no parts of options, and writes it unless it was changed meanwhile."""
    for left in reversed(range(_TRIES)):
        try:
            current = resources.get(name)
        except NotFoundError:
            if not create_missing:
                raise
            current = None
        definition = Data() if current is None else kind.definition(current)
        paths = [apply_setting(definition, kind.descriptor, one, kind.hidden) for one in settings]
        if current is None:
            create(kind, resources, name, definition, dry_run, as_json)
            return
        masks = [*dict.fromkeys(mask_of(path) for path in paths)]
        change = kind.resource(definition, name, current.etag)
        try:
            changed = resources.update(change, masks, validate_only=dry_run)
        except AbortedError:
            if not left:
                raise
            continue
        _tell(kind, name, "changed", kind.definition(current), changed, dry_run, as_json)
        return


def apply(kind: Kind[ResourceT], resources: Resources[ResourceT], file: Path, dry_run: bool, as_json: bool) -> None:
    """Makes the resources of a file what the file says; others stay. All entries are read before the first change."""
    wanted = []
    for place, entry in entries(read_file(file), kind, file):
        name, definition = definition_of(entry, kind, place)
        if not name:
            raise ArgumentValueError(f"{place}.name" if place else "name", f"must be set, such as {kind.prefix}NAME")
        wanted.append((name, definition))
    for name, definition in wanted:
        _apply_one(kind, resources, name, definition, dry_run, as_json)


def _apply_one(
    kind: Kind[ResourceT],
    resources: Resources[ResourceT],
    name: str,
    definition: Data,
    dry_run: bool,
    as_json: bool,
) -> None:
    try:
        current = resources.get(name)
    except NotFoundError:
        create(kind, resources, name, definition, dry_run, as_json)
        return
    before = kind.definition(current)
    change = kind.resource(definition, name, current.etag)
    masks = [mask_of(path) for path in changed_paths(before, kind.definition(change), kind.descriptor)]
    changed = resources.update(change, masks, validate_only=dry_run) if masks else current
    _tell(kind, name, "changed" if masks else "", before, changed, dry_run, as_json)


def edit_one(kind: Kind[ResourceT], resources: Resources[ResourceT], name: str) -> None:
    saved = edit(kind, resources, name)
    typer.echo("nothing changed" if saved is None else f"{kind.noun} {name} changed")


def delete(
    kind: Kind[ResourceT],
    resources: Resources[ResourceT],
    name: str,
    question: str,
    *,
    allow_missing: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    if not (yes or dry_run):
        typer.confirm(question, abort=True)
    resources.delete(name, allow_missing=allow_missing, validate_only=dry_run)
    typer.echo(f"{kind.noun} {name} {'would be ' if dry_run else ''}deleted")


def print_all(
    kind: Kind[ResourceT], resources: Resources[ResourceT], as_json: bool, table: Callable[[list[ResourceT]], None]
) -> None:
    found = [*resources.list()]
    if as_json:
        print_json({kind.plural: [kind.data(one) for one in found]})
    elif found:
        table(found)
    else:
        typer.echo(f"no {kind.plural}")


def _tell(
    kind: Kind[ResourceT], name: str, done: str, before: Data, after: ResourceT, dry_run: bool, as_json: bool
) -> None:
    if as_json:
        print_json(kind.data(after))
        return
    typer.echo(f"{kind.noun} {name} {'would be ' if dry_run and done else ''}{done or 'is as in the file'}")
    if done:
        print_differences(before, kind.definition(after))
