"""The dashboards are those that the tool writes, and say what they show."""

from __future__ import annotations

from typing import Any

import pytest

from tests.monitoring.expressions import DASHBOARDS, dashboards, panels
from tools.monitoring import files

UNITS = {"short", "s", "bytes", "reqps", "percentunit"}
"""Units of ours, by Grafana's ids: it shows an unknown one as a suffix."""


def test_the_committed_files_are_those_that_the_tool_writes() -> None:
    written = files()
    assert {path.name for path in DASHBOARDS.iterdir()} == written.keys()
    for name, text in written.items():
        assert (DASHBOARDS / name).read_text() == text, f"{name}: run `make dashboards`"


@pytest.mark.parametrize("name", dashboards())
def test_panels_have_unique_titles_descriptions_and_units(name: str) -> None:
    dashboard: Any = dashboards()[name]
    assert name == f"{dashboard['uid']}.json"
    titles = [panel["title"] for panel in panels(dashboard)]
    assert len({*titles}) == len(titles) > 8
    for panel in panels(dashboard):
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            assert 'namespace=~"$namespace", pod=~"$pod"' in target["expr"]
            assert target["legendFormat"]
