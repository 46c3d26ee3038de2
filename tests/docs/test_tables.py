"""Tables of the documentation have what the code has: errors with their statuses, sizes of the chart, formulas."""

from __future__ import annotations

import re
from typing import Any

import grpc
import pytest

from draftwood_client.errors import ErrorDetails, StatusError
from draftwood_service.gateway.errors import status_of
from draftwood_service.rpc.statuses import INTERNAL, RULES
from tests.docs.pages import ROOT
from tests.helm.chart import render
from tests.helm.test_renders import pod_of, server_of


def test_the_table_has_every_reason_with_its_statuses() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    rows = re.findall(r"^\| `([A-Z_]+)` \| ([A-Z_]+) \| (\d+) \|", page, re.MULTILINE)
    told = {reason: (grpc.StatusCode[status], int(http)) for reason, status, http in rows}
    assert len(told) == len(rows)
    assert told == {
        rule.reason: (rule.code, status_of(StatusError(ErrorDetails(rule.code, "", reason=rule.reason))))
        for rule in (*RULES.values(), INTERNAL)
    }


def test_the_map_of_promises_names_tests_that_exist() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = [row for row in page.splitlines() if row.startswith("| ") and "`tests/" in row and "make " not in row]
    assert len(rows) > 10
    for row in rows:
        first, *others = re.findall(r"`([\w./]+)`", row.rsplit("|", 2)[1])
        assert (ROOT / first).exists(), first
        for name in others:
            assert (ROOT / name).exists() or ((ROOT / first).parent / name).exists(), name


GIGABYTE = 1e9
GPUS = (23.7, 47.7, 84.0, 150.0)
"""GB of an L4, an L40S, an H100 and an H200 that a process may use."""


def table(begin: str) -> list[list[str]]:
    """Rows of the table whose first line begins so."""
    lines = (ROOT / "docs" / "sizing.md").read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(begin)) + 2
    rows = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


@pytest.mark.parametrize(("column", "count"), [(1, 0), (2, 1), (3, 2), (4, 4)])
def test_the_first_table_is_what_the_chart_renders(column: int, count: int) -> None:
    device: dict[str, Any] = {"device": {"type": "nvidia", "count": count}} if count else {}
    documents = render({"auth": {"open": True}} | device)
    resources, pod = server_of(documents)["resources"], pod_of(documents)
    sizes = {one["name"]: one["emptyDir"]["sizeLimit"] for one in pod["volumes"] if "emptyDir" in one}
    shown = {row[0]: row[column] for row in table("| | CPUs")}
    assert shown["CPU cores, requested"] == resources["requests"]["cpu"]
    assert shown["memory, request and limit"] == resources["requests"]["memory"] == resources["limits"]["memory"]
    assert shown["`/dev/shm`, within it"] == sizes["shm"]
    assert shown["cache (emptyDir)"] == sizes["cache"]
    assert shown["ephemeral storage, request and limit"] == resources["limits"]["ephemeral-storage"]
    assert shown["drain"] == f"{pod['terminationGracePeriodSeconds'] - 10} s"


@pytest.mark.parametrize("row", table("| model | layers"), ids=lambda row: row[0])
def test_keys_and_values(row: list[str]) -> None:
    layers, heads, size = map(int, row[1:4])
    each = 2 * layers * heads * size * 2
    assert int(row[4]) == each / 1024
    for memory, cell in zip(GPUS, row[6:], strict=True):
        tokens = 0.8 * (memory - float(row[5]) - 1.0) * GIGABYTE / each
        if cell:
            assert int(cell.replace(",", "")) == pytest.approx(tokens, rel=0.02)
        else:
            assert tokens < 0


@pytest.mark.parametrize("row", table("| tenants | tokens"), ids=lambda row: f"{row[0]} tenants")
def test_the_store(row: list[str]) -> None:
    tokens = int(row[0].replace(",", "")) * int(row[1].replace(",", ""))
    units = {"MB": 1e6, "GB": 1e9}
    for cell, each in zip(row[2:], (6.7, 60.0), strict=True):
        number, unit = cell.split()
        assert float(number) * units[unit] == pytest.approx(tokens * each)
