"""Alert rules have what a person needs who is woken by them, and runbooks name what exists."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from draftwood_client.cli import build_app
from draftwood_service.settings import Settings
from tests.helm.chart import OPEN, render
from tests.monitoring.expressions import ALERTS, REPOSITORY, RUNBOOKS, dashboards, rules

RULES = {rule["alert"]: rule for rule in rules()}
PROMTOOL = shutil.which("promtool")
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", RUNBOOKS.read_text(), re.MULTILINE | re.DOTALL))
"""Runbooks by alert."""
TESTS = sorted(Path(__file__).parent.glob("*.test.yaml"))
SOURCES = ("memory", "service", "model_runner", "clients/python/draftwood_client")
OTHER_FLAGS = {"--previous", "--latency", "--pid"}
"""Of kubectl, redis-cli and py-spy."""


@pytest.mark.parametrize("name", RULES)
def test_an_alert_says_what_happens_and_where_to_read_on(name: str) -> None:
    rule, annotations = RULES[name], RULES[name]["annotations"]
    assert "for" in rule
    assert rule["labels"] == {"severity": rule["labels"]["severity"]}
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert annotations.keys() == {"summary", "description", "runbook_url"}
    assert "$value" in annotations["description"]
    assert annotations["runbook_url"] == f"docs/runbooks.md#{name.lower()}"


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    assert SECTIONS.keys() == RULES.keys()
    assert len(RULES) == len(rules())


@pytest.mark.parametrize("name", RULES)
def test_a_runbook_has_the_severity_and_the_parts(name: str) -> None:
    text = SECTIONS[name]
    assert f"Severity: {RULES[name]['labels']['severity']}." in text
    for part in ("**For users**", "**How to look**", "what to do**", "**Escalate**"):
        assert part.lower() in text.lower()


@pytest.mark.parametrize("name", RULES)
def test_a_runbook_names_commands_and_settings_that_exist(name: str) -> None:
    quoted = [" ".join(one.split()) for one in re.findall(r"`([^`]+)`", SECTIONS[name])]
    settings = {f"--{key.replace('_', '-')}" for key in Settings.model_fields}
    for text in quoted:
        words = shlex.split(text)
        of_command: set[str] = set()
        if words[0] == "draftwood" and len(words) > 1:
            of_command = _options(words[1:])
        for flag in (word for word in words if word.startswith("--")):
            assert flag in settings | of_command | OTHER_FLAGS, text


def _options(words: list[str]) -> set[str]:
    """Of the command that the words begin with. Fails if there is none."""
    command: Any = typer.main.get_command(build_app())
    while hasattr(command, "commands"):
        assert words[0] in command.commands, words
        command, words = command.commands[words[0]], words[1:]
    return {name for parameter in command.params for name in parameter.opts}


def test_runbooks_quote_log_messages_that_exist() -> None:
    code = "".join(path.read_text() for folder in SOURCES for path in (REPOSITORY / folder).rglob("*.py"))
    quoted = re.findall(r"log:\s+`([^`]+)`", RUNBOOKS.read_text(), re.I)
    assert len(quoted) >= 4
    for message in quoted:
        assert message in code


def test_the_chart_has_the_rules_and_puts_the_address_of_the_runbooks_into_them() -> None:
    rules_on = {"enabled": True, "runbookUrl": "https://draftwood.example/runbooks.html"}
    metrics = {"enabled": True, "rules": rules_on, "dashboards": {"enabled": True}}
    documents = render(OPEN | {"metrics": metrics})
    [made] = [document for document in documents if document["kind"] == "PrometheusRule"]
    expected = ALERTS.read_text().replace("docs/runbooks.md", "https://draftwood.example/runbooks.html")
    assert made["spec"] == yaml.safe_load(expected)
    data = [document["data"] for document in documents if document["kind"] == "ConfigMap"]
    boards = {name: json.loads(text) for one in data for name, text in one.items() if name.endswith(".json")}
    assert boards == dashboards()


@pytest.mark.parametrize("name", RULES)
def test_the_rule_tests_let_every_alert_fire_and_stay_silent(name: str) -> None:
    tests = [test for path in TESTS for test in yaml.safe_load(path.read_text())["tests"]]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    assert {bool(case["exp_alerts"]) for case in cases if case["alertname"] == name} == {True, False}


@pytest.mark.system
@pytest.mark.skipif(PROMTOOL is None, reason="promtool, of Debian's package prometheus, is not installed")
def test_rules_on_data() -> None:
    assert PROMTOOL is not None
    for arguments in (["check", "rules", "--lint-fatal", str(ALERTS)], ["test", "rules", *map(str, TESTS)]):
        done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=110)
        assert done.returncode == 0, done.stdout + done.stderr
