"""One server for each engine, which all tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from draftwood_client import Client
from tests.engines.servers import ENGINES, Served, served_by


@pytest.fixture(scope="session", params=ENGINES)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server of each engine with the bundled model in float32."""
    with served_by(request.param) as server:
        yield server


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(served.target, timeout=100) as client:
        yield client
