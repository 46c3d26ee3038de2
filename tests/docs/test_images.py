"""Images that the documentation builds, loads and installs have the names that the chart asks for."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from tests.docs.pages import blocks
from tests.docs.session import values_of
from tests.helm.chart import OPEN, render

BUILDS: dict[str, dict[str, Any]] = {
    "": {},
    "--build-arg VARIANT=cuda": {"device": {"type": "nvidia"}},
    "--file Dockerfile.vllm": {"device": {"type": "nvidia"}, "engine": "vllm"},
}
"""The values that an image is for, by the options of its build."""


def commands(page: str, begin: str) -> list[list[str]]:
    found = [command for block in blocks(page) for command in block.commands]
    return [shlex.split(command) for command in found if command.startswith(begin)]


def images(values: dict[str, Any]) -> set[str]:
    """Those of the server that a release with these values asks for."""
    pods = [one["spec"]["template"]["spec"] for one in render(values) if one["kind"] == "Deployment"]
    return {each["image"] for pod in pods for each in (*pod["initContainers"], *pod["containers"])}


def test_the_release_of_the_readme_has_the_image_that_is_built_and_loaded_before() -> None:
    [install] = commands("README.md", "helm install")
    [loaded] = commands("README.md", "kind load docker-image")
    assert images(values_of(install)) == {loaded[-1]}
    assert ["docker", "build", "--tag", loaded[-1], "."] in commands("README.md", "docker build")


@pytest.mark.parametrize("options", BUILDS)
def test_each_image_is_built_with_the_tag_that_the_chart_asks_for(options: str) -> None:
    values = {**OPEN, **BUILDS[options], "image": {"repository": "REGISTRY/draftwood"}}
    [name] = images(values)
    assert ["docker", "build", "--tag", name, *options.split(), "."] in commands("docs/image.md", "docker build")
