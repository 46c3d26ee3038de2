"""Grafana dashboards from Python. `python -m tools.monitoring` writes them into the chart's folder."""

from __future__ import annotations

from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from tools.monitoring.drafting import DRAFTING
from tools.monitoring.memory import MEMORY
from tools.monitoring.overview import OVERVIEW
from tools.monitoring.panels import Variable, built

FOLDER = Path(__file__).resolve().parents[2] / "helm/draftwood/files/dashboards"
_VARIABLES = (
    Variable("namespace", "namespace"),
    Variable("model", "gen_ai_request_model", matched=False),
    Variable("pod", "pod"),
)


def files() -> dict[str, str]:
    """The dashboards as JSON, by the names of their files."""
    boards = {board.uid: built(board, _VARIABLES).build() for board in (OVERVIEW, DRAFTING, MEMORY)}
    return {f"{uid}.json": JSONEncoder(sort_keys=True, indent=2).encode(one) + "\n" for uid, one in boards.items()}
