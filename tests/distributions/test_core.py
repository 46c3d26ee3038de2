"""The core, draftwood-strategies and draftwood-memory, in an environment that has nothing else of Draftwood; and
draftwood-tenants above it, which plug-ins have too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributions.workspace import Wheel, environment, present, run

CORE = ("draftwood-strategies", "draftwood-memory")
FOREIGN = ("torch", "transformers", "grpc", "google", "opentelemetry", "pydantic", "structlog", "rich", "typer", "yaml")
IMPORT_SECONDS = 1.0
_MODULES = """
import importlib, pkgutil, sys
for name in sys.argv[1].split():
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, f"{name}."):
        importlib.import_module(module.name)
print(sorted({name.partition(".")[0] for name in sys.modules} & set(sys.argv[2:])))
"""
_TIME = """
import time
began = time.perf_counter()
import draftwood_strategies, draftwood_memory
print(time.perf_counter() - began)
"""


@pytest.fixture(scope="module")
def python(wheels: dict[str, Wheel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("core"), [wheels[name] for name in CORE])


def test_it_imports_with_its_dependencies_alone(python: Path) -> None:
    assert run(python, _MODULES, "draftwood_strategies draftwood_memory", *FOREIGN) == "[]\n"


def test_tenants_bring_the_protocol_and_import_no_grpc(wheels: dict[str, Wheel], tmp_path: Path) -> None:
    python = environment(tmp_path, [wheels[name] for name in (*CORE, "draftwood-client", "draftwood-tenants")])
    found = run(python, _MODULES, "draftwood_tenants", *FOREIGN)
    assert found == "['google', 'yaml']\n"


def test_its_environment_lacks_what_others_need(python: Path) -> None:
    assert present(python, *FOREIGN, "redis", "cryptography", "numba") == ["redis", "cryptography", "numba"]


def test_it_imports_in_less_than_a_second(python: Path) -> None:
    """The best of a few: other processes only add to it."""
    seconds = 10.0
    for _ in range(8):
        seconds = min(seconds, float(run(python, _TIME)))
        if seconds < IMPORT_SECONDS:
            return
    pytest.fail(f"took {seconds:.2f} s at best")
