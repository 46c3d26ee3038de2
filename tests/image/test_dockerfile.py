"""The Dockerfile, without building it: `make image-test` does that."""

from __future__ import annotations

import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

import pytest

from draftwood_service.settings import Settings
from tools.distributions.lock import projects

REPOSITORY = Path(__file__).resolve().parents[2]
TEXT = (REPOSITORY / "Dockerfile").read_text()
LINES = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", TEXT, flags=re.M)).splitlines()
IGNORED = [line for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]


FOR_VLLM = (REPOSITORY / "Dockerfile.vllm").read_text()


def arguments(instruction: str) -> list[str]:
    """What follows each use of an instruction."""
    return [line.partition(" ")[2].strip() for line in LINES if line.startswith(f"{instruction} ")]


def copied() -> list[str]:
    """What is copied from the repository."""
    return [name for line in arguments("COPY") if "--from=" not in line for name in line.split()[:-1]]


def sent(path: str) -> bool:
    """Whether a builder gets a file: the last pattern that matches it, or a folder above it, decides."""
    parts = PurePosixPath(path).parts
    above = ["/".join(parts[: end + 1]) for end in range(len(parts))]
    result = True
    for pattern in IGNORED:
        plain = pattern.removeprefix("!")
        if any(fnmatch(one, plain) and (plain.startswith("**") or one.count("/") == plain.count("/")) for one in above):
            result = pattern.startswith("!")
    return result


def test_hadolint_finds_nothing() -> None:
    files = [REPOSITORY / "Dockerfile", REPOSITORY / "Dockerfile.vllm"]
    command = [Path(sys.executable).with_name("hadolint"), *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_what_is_copied_exists_and_is_sent_to_the_builder() -> None:
    names = copied()
    assert {"pylock.toml", "service"} <= set(names)
    for name in names:
        assert (REPOSITORY / name).exists(), name
        assert sent(name), name


def test_the_builder_gets_nothing_else() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    files = [*listed.stdout.splitlines(), ".git/config", ".venv/bin/python", "build/x", "service/__pycache__/a.pyc"]
    needed = (*copied(), "plugins/vllm")
    for file in filter(sent, files):
        assert file in needed or file.startswith(tuple(f"{name}/" for name in needed)), file
    assert sent("service/draftwood_service/rpc/server.py")
    assert not any(map(sent, ("tests/conftest.py", ".git/config", "tools/chart_schema.py", "service/x/__pycache__/a")))


def test_the_wheels_find_all_that_they_are_made_of() -> None:
    """The folders of all distributions, and the stubs."""
    assert {folder for folder in projects() if not folder.startswith("plugins/")} | {"protos"} <= set(copied())


def test_the_image_has_the_extras_that_its_command_needs() -> None:
    [installed] = [line for line in arguments("RUN") if "pip wheel" in line]
    extras = projects()["service"]["optional-dependencies"]
    assert "[embedded,gateway,s3,telemetry]" in installed
    assert {"embedded", "gateway", "s3", "telemetry"} <= extras.keys()
    for folder, project in projects().items():
        elsewhere = project["name"] == "draftwood-benchmarks" or folder.startswith("plugins/")
        assert (f"./{folder} " in installed) == (not elsewhere)


def test_the_image_for_gpus_has_what_triton_compiles_with() -> None:
    start = LINES.index("FROM run-cpu AS run-cuda")
    stage = LINES[start + 1 : next(at for at in range(start + 1, len(LINES)) if LINES[at].startswith("FROM "))]
    [installs] = [line for line in stage if line.startswith("RUN ")]
    assert {"gcc", "libc6-dev"} <= {*installs.split()}


def test_vllms_image_has_all_distributions_and_runs_as_the_other() -> None:
    lines = re.sub(r"\\\n", " ", FOR_VLLM)
    for folder, project in projects().items():
        wanted = project["name"] not in ("draftwood-benchmarks", "draftwood-sglang")
        assert (f"COPY {folder} {folder}\n" in lines) == wanted, folder
        assert (f" ./{folder} " in lines.replace("\n", " ")) == wanted, folder
    for instruction in ("USER", "EXPOSE", "VOLUME", "STOPSIGNAL", "ENTRYPOINT", "CMD"):
        assert f"{instruction} {arguments(instruction)[-1]}" in FOR_VLLM, instruction


def test_vllms_base_is_an_argument() -> None:
    assert "\nARG BASE=docker.io/vllm/vllm-openai:${VLLM_VERSION}\n" in FOR_VLLM
    bases = {line.split()[1] for line in FOR_VLLM.splitlines() if line.startswith("FROM ")}
    assert bases == {"${BASE}"}


def test_folders_are_for_any_user_of_group_0() -> None:
    copies = [line for line in arguments("COPY") if "/image/var/" in line]
    assert len(copies) == 2
    assert all("--chown=10001:0 " in line for line in copies)
    assert "chmod -R g=u /image/var" in TEXT
    assert "chown -R 10001:0" in FOR_VLLM
    assert "chmod -R g=u" in FOR_VLLM


@pytest.mark.parametrize("document", ["docs/image.md", "helm/draftwood/values.yaml"])
def test_the_user_is_that_of_the_documents(document: str) -> None:
    assert arguments("USER") == ["10001:10001"]
    assert "10001" in (REPOSITORY / document).read_text()


def test_the_ports_are_those_of_the_command() -> None:
    command = arguments("CMD")[-1]
    ports = [str(Settings.model_fields["port"].default), *re.findall(r'port", "(\d+)"', command)]
    assert arguments("EXPOSE") == [" ".join(ports)]
    for port in ports:
        assert port in (REPOSITORY / "docs/image.md").read_text()
        assert port in (REPOSITORY / "helm/draftwood/templates/_pod.tpl").read_text()
    assert "open" not in command


def test_the_version_is_that_of_the_distribution() -> None:
    [version] = {project["version"] for project in projects().values()}
    assert f"VERSION={version}" in arguments("ARG")


def test_bases_are_arguments_that_a_digest_fits_into() -> None:
    assert [argument.split("=")[0] for argument in arguments("ARG")[:3]] == ["VARIANT", "BASE_BUILD", "BASE_RUN"]
    froms = [argument.split()[0] for argument in arguments("FROM")]
    stages = {argument.split()[-1] for argument in arguments("FROM") if " AS " in argument}
    for base in froms:
        assert base in ("${BASE_BUILD}", "${BASE_RUN}", "torch-${VARIANT}", "run-${VARIANT}") or base in stages
    assert {f"{kind}-{variant}" for kind in ("torch", "run") for variant in ("cpu", "cuda")} <= stages
