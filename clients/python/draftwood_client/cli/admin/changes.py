"""What `draftwood tenant` and `draftwood experiment` do alike: list, show, create, set, apply, edit and delete."""
# Annotations are no text here: those of the commands are made with them.

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Generic

import typer

from draftwood_client.admin.client import AdminClient
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
from draftwood_client.cli.answering import AsJson
from draftwood_client.cli.options import ServerOptions, command
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


@dataclass(frozen=True, slots=True)
class Group(Generic[ResourceT]):
    """The commands of one kind.

    Attributes:
        of: the kind's resources of a client.
        table: prints a list of them.
        name, setting: the help of the arguments NAME and FIELD=VALUE.
        about_list, about_set, about_apply, about_delete: the help of these commands.
        question: before a deletion, with {name!r}.
        set_creates: `set` makes a resource that is not there.
    """

    kind: Kind[ResourceT]
    of: Callable[[AdminClient], Resources[ResourceT]]
    table: Callable[[list[ResourceT]], None]
    name: str
    setting: str
    about_list: str
    about_set: str
    about_apply: str
    about_delete: str
    question: str
    set_creates: bool = False

    def add_to(self, app: typer.Typer, create: Callable[..., None]) -> None:
        """Adds the commands that all kinds have; `create` is the kind's own."""
        kind, of = self.kind, self.of
        a_noun = f"a{'n' if kind.noun[0] in 'aeiou' else ''} {kind.noun}"
        Name = Annotated[str, typer.Argument(metavar=kind.noun.upper(), help=self.name)]
        Settings = Annotated[list[str], typer.Argument(metavar="FIELD=VALUE...", help=self.setting)]

        def list_all(server: ServerOptions, as_json: AsJson = False) -> None:
            with server.admin_client() as admin:
                found = [*of(admin).list()]
            if as_json:
                print_json({kind.plural: [kind.data(one) for one in found]})
            elif found:
                self.table(found)
            else:
                typer.echo(f"no {kind.plural}")

        def show(server: ServerOptions, name: Name, as_json: AsJson = False) -> None:
            with server.admin_client() as admin:
                found = of(admin).get(name)
            if as_json:
                print_json(kind.data(found))
            else:
                print_resource(kind, found)

        def set_some(
            server: ServerOptions, name: Name, settings: Settings, dry_run: DryRun = False, as_json: AsJson = False
        ) -> None:
            with server.admin_client() as admin:
                set_fields(kind, of(admin), name, settings, dry_run, as_json, create_missing=self.set_creates)

        def apply_file(
            server: ServerOptions, file: RequiredFile, dry_run: DryRun = False, as_json: AsJson = False
        ) -> None:
            with server.admin_client() as admin:
                apply(kind, of(admin), file, dry_run, as_json)

        def edit_one(server: ServerOptions, name: Name) -> None:
            with server.admin_client() as admin:
                saved = edit(kind, of(admin), name)
            typer.echo("nothing changed" if saved is None else f"{kind.noun} {name} changed")

        def delete(
            server: ServerOptions,
            name: Name,
            allow_missing: Annotated[bool, typer.Option("--allow-missing", help="No error if there is none.")] = False,
            dry_run: DryRun = False,
            yes: Yes = False,
        ) -> None:
            with server.admin_client() as admin:
                if not (yes or dry_run):
                    typer.confirm(self.question.format(name=name), abort=True)
                of(admin).delete(name, allow_missing=allow_missing, validate_only=dry_run)
            typer.echo(f"{kind.noun} {name} {'would be ' if dry_run else ''}deleted")

        app.command("list", help=self.about_list)(command(list_all))
        app.command("show", help=f"Show {a_noun} as YAML that `apply` takes.")(command(show))
        app.command("create")(create)
        app.command("set", help=self.about_set)(command(set_some))
        app.command("apply", help=self.about_apply)(command(apply_file))
        app.command("edit", help=f"Change {a_noun} in $VISUAL or $EDITOR.")(command(edit_one))
        app.command("delete", help=self.about_delete)(command(delete))


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


def _tell(
    kind: Kind[ResourceT], name: str, done: str, before: Data, after: ResourceT, dry_run: bool, as_json: bool
) -> None:
    if as_json:
        print_json(kind.data(after))
        return
    typer.echo(f"{kind.noun} {name} {'would be ' if dry_run and done else ''}{done or 'is as in the file'}")
    if done:
        print_differences(before, kind.definition(after))
