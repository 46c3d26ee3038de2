"""The table of docs/errors.md has every reason that the server sends, with its status."""

from __future__ import annotations

import re

import grpc

from draftwood_client.errors import ErrorDetails, StatusError
from draftwood_service.errors import INTERNAL, RULES
from draftwood_service.gateway.errors import status_of
from tests.docs.pages import ROOT


def test_the_table_has_every_reason_with_its_statuses() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    rows = re.findall(r"^\| `([A-Z_]+)` \| ([A-Z_]+) \| (\d+) \|", page, re.MULTILINE)
    told = {reason: (grpc.StatusCode[status], int(http)) for reason, status, http in rows}
    assert len(told) == len(rows)
    assert told == {
        rule.reason: (rule.code, status_of(StatusError(ErrorDetails(rule.code, "", reason=rule.reason))))
        for rule in (*RULES.values(), INTERNAL)
    }
