"""Prompts of two kinds that no public benchmark has as files: edits of code, and steps of an agent.

`python -m tools.measurements.prompts FOLDER` reads `humaneval.jsonl` there, and writes `edits.jsonl` and `agents.jsonl`
beside it: the same lines each time.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

_CHANGES = (
    "with type annotations for each local variable",
    "with a check at its beginning that raises ValueError if the first argument is None",
    "so that the variable that holds the answer is called `answer`",
    "with a comment above each line that says what the line does",
    "so that it prints its arguments first",
    "as a method of a class `Solution`",
)
_ITEMS = ("lamp", "desk", "chair", "shelf", "mug", "kettle", "clock", "rug", "stool", "vase", "mirror", "frame")
_STATES = ("packed", "shipped", "delivered", "returned")


def edits(path: Path) -> list[str]:
    """A request to rewrite each function of HumanEval, whose text the answer repeats but for the change."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        f"Here is a function:\n\n```python\n{row['prompt'].strip()}\n{row['canonical_solution'].rstrip()}\n```\n\n"
        f"Write the whole function again {_CHANGES[number % len(_CHANGES)]}. Answer with the code alone."
        for number, row in enumerate(rows)
    ]


def agents(count: int = 96) -> list[str]:
    """A tool's JSON that is to be given back with one value changed, as an agent does between two tools."""
    draw = random.Random(0)
    found = []
    for number in range(count):
        items = [{"name": name, "count": draw.randint(1, 9)} for name in draw.sample(_ITEMS, 3)]
        order = {
            "order_id": draw.randint(10_000, 99_999),
            "customer": f"customer-{draw.randint(100, 999)}",
            "state": _STATES[number % len(_STATES)],
            "items": items,
        }
        after = _STATES[(number + 1) % len(_STATES)]
        found.append(
            f"The tool `get_order` returned:\n\n```json\n{json.dumps(order, indent=2)}\n```\n\nCall `update_order` with"
            f' the same JSON, in which "state" is "{after}". Answer with the JSON alone.'
        )
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    for name, prompts in (("edits", edits(folder / "humaneval.jsonl")), ("agents", agents())):
        lines = (json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
