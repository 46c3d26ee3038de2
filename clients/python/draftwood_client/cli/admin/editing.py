"""`edit`: a resource as YAML in the person's editor, again with the error as a comment until it is accepted."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from draftwood_client.cli.admin.documents import (
    Kind,
    definition_of,
    differences,
    from_yaml,
    print_differences,
    to_yaml,
)
from draftwood_client.cli.admin.fields import Data, changed_paths, checked, copied, mask_of
from draftwood_client.cli.options import error_line
from draftwood_client.errors import (
    AbortedError,
    ArgumentError,
    ArgumentValueError,
    FailedPreconditionError,
    InvalidRequestError,
)

_EDITORS = ("vi", "nano", "notepad")
_HEADER = """\
# {noun} {name}. Lines that begin with # are ignored; an empty file changes nothing.
# Remove a field for its default. Durations: 90s, 5m, 1h30m.
"""


def edit(kind: Kind, resources: Any, name: str) -> Any:
    """The changed resource; None if nothing was changed.

    Raises:
        ArgumentValueError: there is no editor, or it failed.
        StatusError: the server refused for another reason than the text.
    """
    command = _editor()
    base = resources.get(name)
    draft = _Draft(kind.definition(base), kind.definition(base))
    header = _HEADER.format(noun=kind.noun, name=name)
    text, problem, note = header + to_yaml(draft.base), "", ""
    while True:
        comment = _commented("NOTE", note) + _commented("ERROR", problem)
        shown = comment + text
        edited = _edited(command, shown, kind.noun)
        if edited == shown and problem:
            raise ArgumentValueError(kind.noun, f"nothing was saved; {problem}")
        text, note = edited.removeprefix(comment), ""
        try:
            document = from_yaml(edited, "text")
            if document is None:
                return None
            draft.wanted = definition_of(document, kind, "")[1]
            paths = [mask_of(path) for path in changed_paths(draft.base, draft.wanted, kind.descriptor)]
            if not paths:
                return None
            change = kind.resource(draft.wanted, name, base.etag)
            would = resources.update(change, paths, validate_only=True)
            saved = resources.update(change, paths)
        except (ArgumentError, InvalidRequestError, FailedPreconditionError) as error:
            problem = error_line(error)
            continue
        except AbortedError:
            base, note = _newer(kind, resources, name, draft)
            text, problem = header + to_yaml(draft.wanted), ""
            continue
        print_differences(draft.base, kind.definition(would))
        return saved


@dataclass(slots=True)
class _Draft:
    """The definition that the person started from, and the one that the person wants."""

    base: Data
    wanted: Data


def _newer(kind: Kind, resources: Any, name: str, draft: _Draft) -> tuple[Any, str]:
    """The resource as it is now, and what to tell; the person's changes are carried over to it.

    Raises:
        typer.Abort: the person does not want to go on.
    """
    current = resources.get(name)
    definition = kind.definition(current)
    lines = differences(draft.base, definition) or ["no field that can be set here"]
    typer.echo(f"{kind.noun} {name} was changed meanwhile:\n" + "\n".join(f"  {line}" for line in lines), err=True)
    typer.confirm("Open the editor again, with your changes to the newer one?", default=True, abort=True, err=True)
    descriptor = kind.descriptor
    draft.wanted = copied(draft.wanted, definition, [*changed_paths(draft.base, draft.wanted, descriptor)])
    draft.wanted = checked(draft.wanted, descriptor)
    draft.base = definition
    return current, "changed meanwhile by another: " + "; ".join(lines)


def _editor() -> list[str]:
    """Raises ArgumentValueError."""
    given = os.environ.get("VISUAL") or os.environ.get("EDITOR")
    if given:
        return shlex.split(given)
    if editor := next(filter(shutil.which, _EDITORS), None):
        return [editor]
    raise ArgumentValueError("EDITOR", "is not set, and there is neither vi nor nano")


def _edited(command: list[str], text: str, noun: str) -> str:
    """The text after the editor has ended. The file is of this user alone, and is removed."""
    with tempfile.TemporaryDirectory(prefix="draftwood-") as folder:
        file = Path(folder, f"{noun}.yaml")
        file.write_text(text, encoding="utf-8")
        try:
            status = subprocess.run([*command, str(file)], check=False).returncode
            edited = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentValueError("EDITOR", f"{shlex.join(command)}: {error}") from None
    if status:
        raise ArgumentValueError("EDITOR", f"{shlex.join(command)} ended with status {status}; nothing was saved")
    return edited


def _commented(word: str, text: str) -> str:
    return f"# {word}: {text}\n#\n" if text else ""
