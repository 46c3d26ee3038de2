from __future__ import annotations

import pytest

from tests.monitoring.expressions import exposed
from tests.monitoring.service import watched_service


@pytest.fixture(scope="package")
def series() -> dict[str, set[str]]:
    """The labels that a real service exposes, by metric."""
    with watched_service() as service:
        return exposed(service.audited())
