"""The core is installed beside SGLang, and the plug-in beside vLLM, without changing one of their versions.

`hosts` has what pip installs for each of them (`make hosts`). Requirements of ours, and of what they bring, are met by
those versions, or by packages that the host does not have, in the version of our lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.distributions.workspace import Wheel, required

CORE = ("draftwood-memory", "draftwood-strategies")
OURS = {
    "sglang": (*CORE, "draftwood-client", "draftwood-tenants", "draftwood-sglang"),
    "vllm": (*CORE, "draftwood-client", "draftwood-tenants", "draftwood-vllm"),
}
"""What is installed beside each host."""
HOSTS = ("vllm-0.26", "vllm-0.32", "vllm-0.33", "sglang-0.5.23")


def versions(host: str) -> dict[str, str]:
    text = (Path(__file__).parent / "hosts" / f"{host}.txt").read_text()
    lines = [line.partition("==") for line in text.splitlines() if not line.startswith("#")]
    return {name: version for name, _, version in lines}


def needed(
    wheels: dict[str, Wheel], installed: tuple[str, ...], held: dict[str, str]
) -> Iterator[tuple[str, Requirement]]:
    """Who requires what: distributions of ours, and all that is added for them to what a host holds."""
    waiting = [(name, one) for name in installed for one in required(wheels[name].metadata.requires_dist or [])]
    seen: set[str] = set()
    while waiting:
        by, one = waiting.pop()
        yield by, one
        name = canonicalize_name(one.name)
        if name not in held and name not in installed and str(one) not in seen:
            seen.add(str(one))
            of_it = [Requirement(text) for text in distribution(name).requires or ()]
            waiting += [(name, other) for other in required(of_it, one.extras)]


@pytest.mark.parametrize("host", HOSTS)
def test_nothing_of_the_host_changes_and_what_is_added_fits(host: str, wheels: dict[str, Wheel]) -> None:
    """Packages that the host does not have are taken in a version that we test with."""
    name, _, version = host.partition("-")
    held, ours = versions(host), OURS[name]
    assert held[name].startswith(version)
    requirements = [*needed(wheels, ours, held)]
    of_host = [(by, one) for by, one in requirements if canonicalize_name(one.name) in held]
    assert {"numba", "numpy", "cryptography"} <= {one.name for _, one in of_host}
    unmet = [f"{by}: {one}" for by, one in of_host if held[canonicalize_name(one.name)] not in one.specifier]
    assert unmet == []
    added = [one for _, one in requirements if canonicalize_name(one.name) not in held and one.name not in ours]
    assert {one.name for one in added} <= {"redis", "googleapis-common-protos"}
    assert all(distribution(one.name).version in one.specifier for one in added)
