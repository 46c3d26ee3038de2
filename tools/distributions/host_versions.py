"""Installs the core beside vLLM and SGLang, and prints what pip would change: `make hosts`.

pip resolves each host from metadata, for this Python and system. An environment gets the metadata of all that it
resolved and none of the gigabytes: pip looks at nothing else. The versions go to `tests/distributions/hosts`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from tools.distributions.lock import ROOT

FOLDER = ROOT / "tests/distributions/hosts"
HOSTS = ("vllm==0.26.*", "vllm==0.32.*", "vllm==0.33.*", "sglang==0.5.23")
CORE = ("strategies", "memory")


def would_install(*wanted: str, of_pip: Sequence[str]) -> list[dict[str, Any]]:
    """Metadata of each distribution that pip, with options of its own, would install."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *of_pip, "install", "--quiet"]
        subprocess.run([*command, "--dry-run", "--report", str(report), *wanted], check=True)
        return [load["metadata"] for load in json.loads(report.read_text())["install"]]


def hold(site: Path, metadata: dict[str, Any]) -> None:
    """Makes pip take a distribution for installed."""
    folder = site / f"{canonicalize_name(metadata['name']).replace('-', '_')}-{metadata['version']}.dist-info"
    folder.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {metadata['name']}", f"Version: {metadata['version']}"]
    lines += [f"Provides-Extra: {extra}" for extra in metadata.get("provides_extra", ())]
    lines += [f"Requires-Dist: {required}" for required in metadata.get("requires_dist", ())]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")


def changes(held: list[dict[str, Any]]) -> list[str]:
    """What pip would install for the core where a host is installed; "NAME OLD -> NEW" for what it would change."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, symlinks=True)
        site = next(Path(folder).glob("lib/python*/site-packages"))
        for metadata in held:
            hold(site, metadata)
        found = would_install(*(str(ROOT / name) for name in CORE), of_pip=["--python", folder])
    old = {canonicalize_name(one["name"]): one["version"] for one in held}
    return [
        f"{one['name']} {old[name]} -> {one['version']}" if name in old else f"{one['name']} {one['version']}"
        for one in found
        for name in [canonicalize_name(one["name"])]
    ]


def main() -> None:
    for requirement in HOSTS:
        held = would_install("--ignore-installed", requirement, of_pip=["--isolated"])
        name, _, version = requirement.partition("==")
        versions = {canonicalize_name(one["name"]): one["version"].partition("+")[0] for one in held}
        heading = f"# What pip installs for {requirement}, with CPython 3.11 on Linux, x86-64 (`make hosts`)."
        lines = [heading, *(f"{package}=={found}" for package, found in sorted(versions.items()))]
        (FOLDER / f"{name}-{version.removesuffix('.*')}.txt").write_text("\n".join(lines) + "\n")
        added, version = ", ".join(sorted(changes(held))), versions[canonicalize_name(name)]
        print(f"beside {name} {version}, {len(held)} packages, pip adds: {added}")


if __name__ == "__main__":
    main()
