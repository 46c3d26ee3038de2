"""A real service with the bundled model, and `draftwood gateway` in front of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from draftwood_benchmarks.harness.gateway_process import running_gateway
from draftwood_benchmarks.harness.server_process import running_server
from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL
from tests.model_runner.loading.templates import HERMES


@pytest.fixture(scope="session")
def gateway() -> Iterator[str]:
    """Its URL."""
    with _gateway("--max-running", "64", "--max-waiting", "128") as url:
        yield url


@pytest.fixture(scope="session")
def gateway_with_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of one whose model has a chat template with tools, though it was never trained on them."""
    folder = tmp_path_factory.mktemp("tools") / "draftwood-demo"
    shutil.copytree(BUNDLED_MODEL, folder)
    (folder / "chat_template.jinja").write_text(HERMES, encoding="utf-8")
    with _gateway("--model", str(folder)) as url:
        yield url


@contextmanager
def _gateway(*flags: str) -> Iterator[str]:
    with running_server("--threads", "1", *flags) as target, running_gateway(target) as started:
        yield f"http://{started.target}"
