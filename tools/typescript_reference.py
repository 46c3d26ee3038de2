"""Writes `docs/reference/typescript.md`: what the TypeScript client exports, with its comments.

Run as `python -m tools.typescript_reference`, after `npm run build` in `clients/typescript`. It copies the declarations
that the compiler wrote there (`dist/*.d.ts`), in the order in which `index.d.ts` exports them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "typescript.md"
BUILT = ROOT / "clients" / "typescript" / "dist"
_EXPORTS = re.compile(r'^export (?:type )?(\*|\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
_DECLARATION = re.compile(
    r"^(?:/\*\*(?P<comment>(?:(?!\*/).)*)\*/\n)?"
    r"export (?:declare )?(?P<code>(?:abstract )?(?:class|const|function|interface|type) (?P<name>\w+)"
    r"(?:[^\n]*\{\n.*?^\};?|[^\n]*(?:\n [^\n]*)*;))$",
    re.MULTILINE | re.DOTALL,
)
_HEAD = """# TypeScript client

Generated from the comments of `clients/typescript`, whose README has examples that a test runs. `pb.` are
messages of the [protocol](generation.md), with names in camel case; the package exports their types.
"""


def page(built: Path) -> str:
    """The page of the declarations in a folder."""
    parts = [_HEAD]
    for exported, file in _EXPORTS.findall((built / "index.d.ts").read_text(encoding="utf-8")):
        names = None if exported == "*" else [word.split()[-1] for word in exported.strip("{} ,").split(",")]
        found = {name: section for name, section in _sections(built / f"{file}.d.ts") if names is None or name in names}
        if missing := sorted(set(names or ()) - found.keys()):
            raise SystemExit(f"{file}.d.ts does not declare {', '.join(missing)}")
        parts += found.values()
    return "\n".join(parts)


def _sections(path: Path) -> Iterator[tuple[str, str]]:
    """Name and text of each declaration of a file."""
    for found in _DECLARATION.finditer(path.read_text(encoding="utf-8")):
        code = re.sub(r"^ +#private;\n", "", found["code"], flags=re.MULTILINE)
        comment = re.sub(r"^ \* ?", "", found["comment"] or "", flags=re.MULTILINE).strip()
        text = [f"## `{found['name']}`\n", comment + "\n" if comment else "", f"```ts\n{code}\n```\n"]
        yield found["name"], "\n".join(part for part in text if part)


if __name__ == "__main__":
    PAGE.write_text(page(Path(sys.argv[1]) if len(sys.argv) > 1 else BUILT), encoding="utf-8")
