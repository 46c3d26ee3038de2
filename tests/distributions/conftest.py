from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.client.fake_server import FakeServer
from tests.distributions.workspace import FOLDERS, Wheel


@pytest.fixture(scope="package")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Wheel]:
    """The wheel of each distribution, by its name."""
    folder = tmp_path_factory.mktemp("wheels")
    return {name: Wheel.build(source, folder) for name, source in FOLDERS.items()}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server
