"""Every command of the documentation runs, or is listed with the reason why it does not."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from draftwood_benchmarks.commands import build_app as bench_app
from draftwood_benchmarks.demo import app as demo_app
from draftwood_benchmarks.harness.servers import ServerError, running_server
from draftwood_client.cli import build_app
from draftwood_service.auth.commands import app as key_app
from draftwood_service.config import CHECK, flag
from draftwood_service.settings import Settings
from tests.docs.not_run import NOT_RUN, PARSED, reason
from tests.docs.pages import Block, blocks, inline_commands, pages
from tests.docs.session import Session
from tests.service.fakes import FakeModel, serving

LANGUAGES = {"console", "json", "python", "sh", "text", "toml", "ts", "yaml"}
OPTIONAL = ("buf", "curl", "jq", "make")
"""Programs that may be missing; a command that needs one is left out then."""
REAL = ("README.md", "docs/gateway.md", "docs/quick-start.md", "docs/write-a-strategy.md")
"""Pages with a service of the bundled model; the others have one that follows a script."""
ALL = [block for page in pages() for block in blocks(page)]
PYTHON_ELSEWHERE = {
    "clients/python/README.md": "tests/client/test_readme.py",
    "docs/security.md": "has a session of the reader's identity provider",
}
"""Pages with Python that is not run here, and where it is, or why not."""
FIRST = {command: block.page for block in reversed(ALL) for command in block.commands if "draftwood serve" in command}
"""The first page with each command that starts a service, which is tried there only."""
WITH_CODE = sorted({block.page for block in ALL if block.commands or block.language == "python"})
REFUSED = {"draftwood serve --max-runing 4": "did you mean --max-running?"}
"""Commands that show an error, and a part of it."""
_AFTER_GROUP = re.compile(r"[A-Z]{2,}|--help|.*\|")
"""What may stand in place of a subcommand: a placeholder, or several subcommands."""


def is_excerpt(block: Block) -> bool:
    """Whether the Python shows a part of the strategy of the example."""
    return block.page == "docs/write-a-strategy.md" and "import" not in block.text


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for that of a socket below it, as pytest's own does not in a worker."""
    with tempfile.TemporaryDirectory(prefix="docs-") as folder:
        yield Path(folder)


@pytest.mark.system
@pytest.mark.parametrize("page", [page for page in WITH_CODE if page not in REAL])
async def test_a_page(page: str, short_path: Path) -> None:
    async with serving(model=FakeModel(max_context=256), strategy="hybrid") as served:
        await asyncio.to_thread(follow, page, short_path, served.server.address)


@pytest.fixture(scope="module")
def real_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_server("--threads", "1") as target:
        yield target


@pytest.mark.system
@pytest.mark.parametrize("page", REAL)
def test_a_page_with_the_bundled_model(page: str, real_service: str, short_path: Path) -> None:
    follow(page, short_path, real_service)


def follow(page: str, folder: Path, service: str) -> None:
    """Does what the page says, from top to bottom."""
    with Session(folder, service) as session:
        session.write_files(blocks(page))
        for block in blocks(page):
            if block.language == "python" and page not in PYTHON_ELSEWHERE and not is_excerpt(block):
                session.run_python(block.text)
            for command in block.commands:
                if not (reason(NOT_RUN, command) or missing(command) or FIRST.get(command, page) != page):
                    do(command, session)


def do(command: str, session: Session) -> None:
    if command in REFUSED:
        with pytest.raises(ServerError, match=re.escape(REFUSED[command])):
            session.run(command)
    elif reason(PARSED, command):
        parse(command.split()[1:])
    else:
        session.run(command)


def missing(command: str) -> bool:
    return any(re.search(rf"(^|\| ){name} ", command) and shutil.which(name) is None for name in OPTIONAL)


def parse(words: list[str]) -> None:
    """Reads the arguments of a command as it does itself; raises its usage error."""
    command, arguments = found_command(words)
    command.make_context(words[0], arguments)


def found_command(words: list[str]) -> tuple[Any, list[str]]:
    """The command of the command line that the words begin with, and the words after its name."""
    apps: dict[str, tuple[typer.Typer, int]] = {
        "bench": (bench_app(words[1:2]), 1),
        "demo": (demo_app, 1),
        "key": (key_app, 1),
    }
    app, used = apps.get(words[0], (build_app(), 0))
    command: Any = typer.main.get_command(app)
    rest = words[used:]
    while rest and rest[0] in getattr(command, "commands", {}):
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


@cache
def flags_of_program(command: str) -> set[str]:
    """What the help of a command shows that is read by a program of its own."""
    program = Path(sys.executable).with_name("draftwood")
    shown = subprocess.run([program, command, "--help"], capture_output=True, text=True, check=True)
    return set(re.findall(r"--[a-z][a-z-]*", shown.stdout))


@pytest.mark.parametrize(("page", "text"), sorted(set(inline_commands())))
def test_a_command_in_running_text_exists_with_its_flags(page: str, text: str) -> None:
    words = text.split()[1:]
    flags = [flag.partition("=")[0] for flag in re.findall(r"--[a-z][a-z-]*", text)]
    if words[0] == "serve":
        known = {CHECK, *(flag(name) for name in Settings.model_fields)}
    elif words[0] in ("gateway", "models"):
        known = flags_of_program(words[0])
    else:
        command, rest = found_command(words)
        assert not rest or not hasattr(command, "commands") or _AFTER_GROUP.match(rest[0]), rest
        known = {name for one in getattr(command, "params", []) for name in (*one.opts, *one.secondary_opts)}
    assert set(flags) <= known | {"--help"}


def test_every_block_says_its_language() -> None:
    assert [(block.page, block.text[:60]) for block in ALL if block.language not in LANGUAGES] == []


def test_no_command_hides_among_outputs() -> None:
    hidden = [
        (one.page, one.text[:60])
        for one in ALL
        if one.language == "text" and re.match(r"\$? ?draftwood [a-z]+ -", one.text)
    ]
    assert hidden == []


@pytest.mark.parametrize("pattern", [*NOT_RUN, *PARSED])
def test_every_exception_is_still_needed(pattern: str) -> None:
    assert any(re.fullmatch(pattern, command) for block in ALL for command in block.commands)


def test_typescript_is_on_the_pages_that_the_clients_own_test_runs() -> None:
    """`clients/typescript/tests/package.test.ts` does. The reference has declarations, which the compiler wrote."""
    pages = {"README.md", "clients/typescript/README.md", "docs/reference/typescript.md"}
    assert {block.page for block in ALL if block.language == "ts"} == pages


def test_the_page_shows_the_strategy_as_it_is() -> None:
    excerpts = [block.text for block in ALL if block.language == "python" and is_excerpt(block)]
    strategy = Path("examples/recall/recall_strategy.py").read_text(encoding="utf-8")
    assert len(excerpts) == 2
    assert [text for text in excerpts if bare(text) not in bare(strategy)] == []


def bare(code: str) -> str:
    """Without indentation and empty lines, which a formatter changes in an excerpt."""
    return "\n".join(line.strip() for line in code.splitlines() if line.strip())
