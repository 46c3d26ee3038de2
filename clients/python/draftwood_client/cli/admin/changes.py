"""What `draftwood tenant` and `draftwood experiment` do alike: list, show, create, set, apply, edit and delete."""
# Annotations are no text here: those of the commands are made with them.

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from draftwood_client.cli.admin.documents import (
    Kind,
    definition_of,
    entries,
    print_differences,
    print_resource,
    read_file,
)
from draftwood_client.cli.admin.editing import edit
from draftwood_client.cli.admin.fields import Data, apply_setting, as_data, changed_paths, mask_of
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
class Group:
    """The commands of one kind.

    Attributes:
        table: prints a list of them.
        name, setting: the help of the arguments NAME and FIELD=VALUE.
        about_list, about_set, about_apply, about_delete: the help of these commands.
        question: before a deletion, with {name!r}.
        set_creates: `set` makes a resource that is not there.
    """

    kind: Kind
    table: Callable[[list[Any]], None]
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
        kind = self.kind
        a_noun = f"a{'n' if kind.noun[0] in 'aeiou' else ''} {kind.noun}"
        Name = Annotated[str, typer.Argument(metavar=kind.noun.upper(), help=self.name)]
        Settings = Annotated[list[str], typer.Argument(metavar="FIELD=VALUE...", help=self.setting)]

        def list_all(server: ServerOptions, as_json: AsJson = False) -> None:
            with server.admin_client() as admin:
                resources = [*kind.of(admin).list()]
            if as_json:
                print_json({kind.plural: [as_data(resource) for resource in resources]})
            elif resources:
                self.table(resources)
            else:
                typer.echo(f"no {kind.plural}")

        def show(server: ServerOptions, name: Name, as_json: AsJson = False) -> None:
            with server.admin_client() as admin:
                resource = kind.of(admin).get(name)
            if as_json:
                print_json(as_data(resource))
            else:
                print_resource(kind, resource)

        def set_some(
            server: ServerOptions, name: Name, settings: Settings, dry_run: DryRun = False, as_json: AsJson = False
        ) -> None:
            with server.admin_client() as admin:
                change = Change(kind, kind.of(admin), dry_run, as_json)
                change.set_fields(name, settings, create_missing=self.set_creates)

        def apply_file(
            server: ServerOptions, file: RequiredFile, dry_run: DryRun = False, as_json: AsJson = False
        ) -> None:
            with server.admin_client() as admin:
                Change(kind, kind.of(admin), dry_run, as_json).apply(file)

        def edit_one(server: ServerOptions, name: Name) -> None:
            with server.admin_client() as admin:
                saved = edit(kind, kind.of(admin), name)
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
                kind.of(admin).delete(name, allow_missing=allow_missing, validate_only=dry_run)
            typer.echo(f"{kind.noun} {name} {'would be ' if dry_run else ''}deleted")

        app.command("list", help=self.about_list)(command(list_all))
        app.command("show", help=f"Show {a_noun} as YAML that `apply` takes.")(command(show))
        app.command("create")(create)
        app.command("set", help=self.about_set)(command(set_some))
        app.command("apply", help=self.about_apply)(command(apply_file))
        app.command("edit", help=f"Change {a_noun} in $VISUAL or $EDITOR.")(command(edit_one))
        app.command("delete", help=self.about_delete)(command(delete))


def file_entry(kind: Kind, file: Path | None, name: str | None) -> tuple[str, Data]:
    """Id and definition of the one resource in a file; an empty definition without a file.

    Raises:
        ArgumentValueError: the file is wrong, has several, or no name is given.
    """
    of_file, data = "", Data()
    if file is not None:
        several = entries(read_file(file), kind, file)
        if len(several) != 1:
            raise ArgumentValueError(str(file), f"has {len(several)} {kind.plural}; use `apply` for several")
        place, entry = several[0]
        of_file, data = definition_of(entry, kind, place)
    if name and of_file and name != of_file:
        raise ArgumentValueError("NAME", f"is {name}, and the file is of {of_file}")
    if not (name or of_file):
        raise ArgumentValueError("NAME", "must be given, as an argument or in the file")
    return name or of_file, data


@dataclass(frozen=True, slots=True)
class Change:
    """How a command writes resources of a kind, and tells it.

    Attributes:
        resources: the calls for the kind.
        dry_run: the server checks, and changes nothing.
    """

    kind: Kind
    resources: Any
    dry_run: bool
    as_json: bool

    def create(self, name: str, definition: Data) -> None:
        made = self.resources.create(name, self.kind.resource(definition, name), validate_only=self.dry_run)
        self._tell(name, "created", {}, made)

    def set_fields(self, name: str, settings: list[str], *, create_missing: bool) -> None:
        """Reads the resource, since masks name no parts of options, and writes it unless it was changed meanwhile."""
        kind = self.kind
        for left in reversed(range(_TRIES)):
            try:
                current = self.resources.get(name)
            except NotFoundError:
                if not create_missing:
                    raise
                current = None
            definition = Data() if current is None else kind.definition(current)
            paths = [apply_setting(definition, kind.descriptor, setting, kind.hidden) for setting in settings]
            if current is None:
                self.create(name, definition)
                return
            masks = [*dict.fromkeys(mask_of(path) for path in paths)]
            try:
                changed = self._update(kind.resource(definition, name, current.etag), masks)
            except AbortedError:
                if not left:
                    raise
                continue
            self._tell(name, "changed", kind.definition(current), changed)
            return

    def apply(self, file: Path) -> None:
        """Makes the resources of a file what the file says; others stay. The file is read before the first change."""
        wanted = []
        for place, entry in entries(read_file(file), self.kind, file):
            name, definition = definition_of(entry, self.kind, place)
            if not name:
                problem = f"must be set, such as {self.kind.prefix}NAME"
                raise ArgumentValueError(f"{place}.name" if place else "name", problem)
            wanted.append((name, definition))
        for name, definition in wanted:
            self._apply_to(name, definition)

    def _apply_to(self, name: str, definition: Data) -> None:
        kind = self.kind
        try:
            current = self.resources.get(name)
        except NotFoundError:
            self.create(name, definition)
            return
        before, change = kind.definition(current), kind.resource(definition, name, current.etag)
        masks = [mask_of(path) for path in changed_paths(before, kind.definition(change), kind.descriptor)]
        self._tell(name, "changed" if masks else "", before, self._update(change, masks) if masks else current)

    def _update(self, change: Any, masks: list[str]) -> Any:
        return self.resources.update(change, masks, validate_only=self.dry_run)

    def _tell(self, name: str, done: str, before: Data, after: Any) -> None:
        if self.as_json:
            print_json(as_data(after))
            return
        would = "would be " if self.dry_run and done else ""
        typer.echo(f"{self.kind.noun} {name} {would}{done or 'is as in the file'}")
        if done:
            print_differences(before, self.kind.definition(after))
