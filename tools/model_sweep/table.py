"""What the sweep writes: an entry for each family, and the table of the docs."""

from __future__ import annotations

import re
from collections.abc import Sequence as SequenceOf
from typing import Any

from draftwood_service.models.families import Family
from tools.model_sweep.families import KNOWN
from tools.model_sweep.trial import RUNNERS

_BEGIN, _END = "<!-- table of the sweep -->", "<!-- end of the table -->"


def entry(family: str, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The family in the file, from the results of `try_runner` by runner."""
    kinds = [result["kind"] for result in results.values() if "kind" in result]
    reasons = {name: result["reason"] for name, result in results.items() if result.get("reason")}
    return {
        "name": family,
        "models": KNOWN.get(family, ""),
        "kind": kinds[0] if kinds else "attention",
        **{runner: results.get(runner, {}).get("result", "refused") for runner in RUNNERS},
        "reason": _reason(results, reasons),
    }


def _reason(results: dict[str, dict[str, Any]], reasons: dict[str, str]) -> str:
    missing = [f"{runner}: not tried" for runner in RUNNERS if runner not in results]
    if "torch" in reasons:  # one reason says enough if no runner computes it
        return "; ".join([_short(reasons["torch"]), *missing])
    return "; ".join([*(_short(reason) for reason in reasons.values()), *missing])


def _short(reason: str) -> str:
    """Without the names of classes, and the numbers of trials that say the same."""
    return re.sub(r"\b\w+(For\w+|LMHeadModel|Decoder|LMHead): ?", "", reason)


def share(entries: SequenceOf[dict[str, Any]]) -> str:
    """How many families each runner serves."""
    counts = {runner: sum(entry[runner] != "refused" for entry in entries) for runner in RUNNERS}
    parts = (f"{runner} {count} ({count / len(entries):.0%})" for runner, count in counts.items())
    return f"of {len(entries)} families: {', '.join(parts)}"


def docs_table(text: str, entries: SequenceOf[dict[str, Any]]) -> str:
    """The page with a new table."""
    lines = ["| family | models | kind | torch | OpenVINO |", "|---|---|---|---|---|"]
    for one in (Family(**each) for each in entries):
        cells = (f"`{one.name}`", one.models, one.kind, *map(one.verified_by, RUNNERS))
        lines.append(f"| {' | '.join(cells)} |")
    before, _, rest = text.partition(_BEGIN)
    return "\n".join(
        [before + _BEGIN, "", share(entries).capitalize() + ".", "", *lines, "", _END + rest.partition(_END)[2]]
    )
