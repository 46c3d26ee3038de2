"""A real service with the bundled model, and `draftwood gateway` in front of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from draftwood_benchmarks.harness.servers import running_gateway, running_server
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


@pytest.fixture(scope="session")
def gateway_with_marker_tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """As `gateway_with_tools`; the markers of calls are tokens of their own, as in models that were trained on them."""
    folder = tmp_path_factory.mktemp("markers") / "draftwood-demo"
    shutil.copytree(BUNDLED_MODEL, folder)
    (folder / "chat_template.jinja").write_text(HERMES, encoding="utf-8")
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    for marker in ("<tool_call>", "</tool_call>"):  # in place of the tokens that were learned last
        token = "".join(merges.pop())
        tokenizer["added_tokens"].append(
            {**tokenizer["added_tokens"][0], "id": vocabulary.pop(token), "content": marker, "special": False}
        )
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    with _gateway("--model", str(folder)) as url:
        yield url


@contextmanager
def _gateway(*flags: str) -> Iterator[str]:
    with running_server("--threads", "1", *flags) as target, running_gateway(target) as started:
        yield f"http://{started.target}"
