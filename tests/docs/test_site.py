"""The site: built as `make docs` builds it, and every link in it followed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from tests.docs.pages import ROOT
from tools import settings_reference
from tools.measurements.page import PAGE
from tools.measurements.page import page as measured_page
from tools.measurements.plot import PLOT, plot
from tools.protocol_reference import PAGES, pages

CONFIG: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
LOADED = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src"}
"""Elements that a browser loads something for, and the attribute that names it."""


class Page(HTMLParser):
    """Anchors of a page, what it links to, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors, self.links, self.loaded = {"", "__comments"}, list[str](), list[str]()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.anchors.update(values[name] for name in ("id", "name") if name in values)
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in LOADED and LOADED[tag] in values and values.get("rel") != "canonical":
            self.loaded.append(values[LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """The pages of the site, by their files."""
    folder = tmp_path_factory.mktemp("site")
    for name in ("docs", "clients/python/draftwood_client", "protos"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "mkdocs.yml", folder)
    build = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(build, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    made = sorted((folder / CONFIG["site_dir"]).rglob("*.html"))
    return {path: Page(path) for path in made if path.name != "404.html"}


@pytest.mark.system
def test_every_link_leads_to_a_file_and_an_anchor_of_the_site(site: dict[Path, Page]) -> None:
    assert len(site) > 40
    broken = []
    for path, page in site.items():
        for link in (*page.links, *page.loaded):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                broken.append(f"{path.name}: {link}: no such file")
            elif target in site and unquote(parts.fragment) not in site[target].anchors:
                broken.append(f"{path.name}: {link}: no such anchor")
    assert broken == []


@pytest.mark.system
def test_no_page_loads_anything_from_elsewhere(site: dict[Path, Page]) -> None:
    assert [(path.name, one) for path, page in site.items() for one in page.loaded if urlsplit(one).netloc] == []


@pytest.mark.system
def test_every_class_and_method_of_the_clients_reference_is_there(site: dict[Path, Page]) -> None:
    [python] = [page for path, page in site.items() if path.name == "python.html"]
    expected = {"Client.chat", "Client.stream_complete", "AsyncClient.complete", "MemoryClient.purge", "StatusError"}
    assert {f"draftwood_client.{name}" for name in expected} <= python.anchors | {
        anchor.replace(".errors.", ".") for anchor in python.anchors
    }


def listed(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from listed(entry)


def test_the_navigation_has_every_page_once_but_the_decisions() -> None:
    written = (path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))
    assert sorted(listed(CONFIG["nav"])) == sorted(page for page in written if not page.startswith("decisions/"))


def test_the_generated_pages_are_those_of_the_protocol_and_the_settings() -> None:
    made = {**pages(), settings_reference.PAGE.name: settings_reference.text()}
    assert {path.name for path in PAGES.iterdir()} == {*made, "python.md", "typescript.md"}
    stale = [name for name, text in made.items() if (PAGES / name).read_text(encoding="utf-8") != text]
    assert stale == [], "run `make reference`"


def test_measurements_are_shown_as_they_were_written() -> None:
    made = {PAGE: measured_page(), PLOT: plot()}
    stale = [path.name for path, text in made.items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run `python -m tools.measurements`"


def test_the_index_of_decisions_has_each_record_once() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"\]\(([^)/]+\.md)\)$", index, re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in folder.glob("*.md") if path.name != "index.md")


def test_comments_name_records_that_exist() -> None:
    words = ["git", "grep", "-hoE", "docs/decisions/[a-z0-9-]+[.]md"]
    named = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).is_file()] == []
