"""The samples of tenants and experiments: a server reads them, and their experiments compare something."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import combinations

import pytest
import yaml

from draftwood.admin.v1.experiments_pb2 import Experiment
from draftwood_service.settings import Settings
from draftwood_strategies.registry import strategy_names
from draftwood_tenants.file import read_content
from draftwood_tenants.reading import read_experiment
from tests.docs.pages import ROOT, blocks, pages


def samples() -> dict[str, str]:
    """The text of a tenants file, by where it is."""
    shown = [(page, [block.text for block in blocks(page) if block.language == "yaml"]) for page in pages()]
    found = {
        f"{page}[{number}]": text
        for page, texts in shown
        for number, text in enumerate(texts)
        if re.search(r"^(tenants|experiments):", text, re.MULTILINE)
    }
    for path in sorted((ROOT / "tests" / "helm" / "values").glob("*.yaml")):
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        if of_tenants := {key: values[key] for key in ("tenants", "experiments") if key in values}:
            found[str(path.relative_to(ROOT))] = json.dumps(of_tenants)
    return found


def test_there_are_samples() -> None:
    assert {"docs/tenants.md[0]", "tests/helm/values/cluster-tenants.yaml"} <= samples().keys()


@pytest.mark.parametrize("strategy", strategy_names())
@pytest.mark.parametrize("sample", samples())
def test_the_experiments_of_samples_name_tenants_and_compare_something(sample: str, strategy: str) -> None:
    """Whatever the server's default strategy is."""
    limits = Settings(strategy=strategy).tenant_limits
    content = read_content(samples()[sample].encode(), limits)
    for name, resource in content.experiments.items():
        experiment = read_experiment(Experiment.FromString(resource.value), limits)
        assert experiment.tenants, f"{name} would start for all tenants"
        assert experiment.tenants <= content.tenants.keys(), f"{name} names tenants that the sample does not define"
        for one, other in combinations(experiment.arms, 2):
            drafts = [replace(arm.drafting, strategy=arm.drafting.strategy or strategy) for arm in (one, other)]
            assert drafts[0] != drafts[1], f"{name}: {one.id} and {other.id} draft alike"
