"""The Python example in the README of each distribution runs as it is; tests/client/test_readme.py has the client's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.client.fake_server import FakeServer, answers
from tests.distributions.workspace import FOLDERS

SHOWN = {
    "draftwood": r"It is here\.\n1\.5\n",
    "draftwood-benchmarks": r"True\n",
    "draftwood-memory": r"\[3 4 5\]\n0\n",
    "draftwood-model-runner": r".+\n",
    "draftwood-tenants": r"control\nNone\n",
    "draftwood-strategies": r"\[3 4 5\] \[-1  0  1\]\n",
}


def example(name: str) -> str:
    [code] = re.findall(r"```python\n(.*?)```", (FOLDERS[name] / "README.md").read_text(), re.DOTALL)
    assert 5 <= len(code.splitlines()) <= 20
    return str(code)


@pytest.mark.timeout(600)  # it may be the first to compile the strategies
@pytest.mark.parametrize("name", SHOWN)
def test_example(name: str, capsys: pytest.CaptureFixture[str], server: FakeServer) -> None:
    server.script = [answers("It is", " here.")]
    exec(compile(example(name).replace("127.0.0.1:50051", server.target), f"{name}/README.md", "exec"), {})
    assert re.fullmatch(SHOWN[name], capsys.readouterr().out, re.DOTALL)


@pytest.mark.parametrize("name", FOLDERS)
def test_links_are_absolute(name: str) -> None:
    """A README is shown by the package index too, where paths of the repository lead nowhere."""
    text = Path(FOLDERS[name] / "README.md").read_text()
    assert [link for link in re.findall(r"\]\((.*?)\)", text) if not link.startswith("https://")] == []
