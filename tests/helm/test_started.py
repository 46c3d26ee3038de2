"""What the chart renders starts: some releases whole, of the others what checks their settings, files and secrets.

`python -m tests.helm.started` starts all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helm.chart import EXAMPLES, VALUES
from tests.helm.started import Row, can_start, inside

STARTED = {"gateway", "rollout", "valkey"}
"""With TLS, a client's certificate and a gateway of its own; by test_rollout.py; and with the bundled store."""

VLLM = ("vllm", "vllm-nodes")

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_start(), reason="needs root, namespaces, and the programs unshare, setpriv and ip"),
]


def containers(rows: list[Row]) -> set[str]:
    assert all(row.ready for row in rows)
    return {row.container for row in rows}


def of(name: str) -> Path:
    return next(path for path in VALUES if path.stem == name)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("gateway", {"check", "server", "check-gateway", "gateway"}), ("valkey", {"check", "server", "valkey"})],
)
def test_a_release_starts_answers_and_ends(name: str, expected: set[str]) -> None:
    assert containers(inside([of(name)])) == expected


def test_the_containers_that_check_find_nothing_wrong() -> None:
    others = [
        path
        for path in VALUES
        if path.stem not in {*STARTED, *VLLM} and (path not in EXAMPLES or path.stem == "openshift")
    ]
    rows = inside(others, only_checks=True)
    assert all(row.ready for row in rows)
    with_server = [path.stem for path in others if path.stem != "several-models"]
    assert [row.values for row in rows if row.container == "check"] == with_server
    assert [row.values for row in rows if row.container == "model"] == ["draft-models", "openshift"]
    drafting = [row.container for row in rows if row.values == "draft-models"]
    assert drafting == ["check", "model", "draft-model", "draft-head"]
    assert [row.values for row in rows if row.container == "check-gateway"] == ["routed", "several-models"]


@pytest.mark.vllm
def test_the_containers_that_check_releases_with_vllm() -> None:
    assert containers(inside([*map(of, VLLM)], only_checks=True)) == {"check", "check 1"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [("vllm", {"check", "server"}), ("vllm-nodes", {"check", "check 1", "server", "server 1"})],
)
def test_a_release_with_vllm_starts_answers_and_ends(name: str, expected: set[str]) -> None:
    assert containers(inside([of(name)])) == expected
