"""The pages of the documentation, and the code in them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HISTORY = ("CHANGELOG.md", "docs/decisions/")
"""Pages that tell what was run at the time, and keep it."""
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"\s+# .*$")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. `language` is what follows the fence."""

    page: str
    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """Of a shell: the lines of `sh`, what follows "$ " in `console`; without comments, continued lines joined."""
        lines = self.text.replace("\\\n", "").splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        elif self.language != "sh":
            return []
        return [bare for line in lines if (bare := " ".join(_COMMENT.sub("", line).split()))]


@cache
def pages() -> dict[str, str]:
    """The text of each page, by path."""
    listed = subprocess.run(["git", "ls-files", "-z", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    names = [
        name for name in listed.stdout.split("\0") if name and not name.startswith(HISTORY) and (ROOT / name).is_file()
    ]
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in names}


def blocks(page: str) -> list[Block]:
    return [Block(page, *found.groups()) for found in _FENCE.finditer(pages()[page])]


def inline_commands() -> Iterator[tuple[str, str]]:
    """Page and text of each `draftwood ...` in running text."""
    for page, text in pages().items():
        for code in re.findall(r"`(draftwood [a-z][^`]*)`", _FENCE.sub("", text)):
            yield page, " ".join(code.split())
