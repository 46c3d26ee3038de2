"""`draftwood experiment` over a real channel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from google.protobuf.json_format import ParseDict

from draftwood.admin.v1 import experiments_pb2 as xp
from tests.client.conftest import Cli
from tests.client.fake_admin import FakeAdmin

CREATE = (
    *("experiment", "create", "trie-vs-hybrid", "--arm", "control=trie"),
    *("--arm", "hybrid=hybrid,branch_length=8,max_nodes=16,learn=both", "--weight", "hybrid=2", "--fork", "hybrid"),
    *("--coverage", "0.5", "--unit", "session", "--tenant", "acme", "--tenant", "beta", "--burn-in", "5m"),
)


@pytest.fixture
def made(admin: FakeAdmin, run_admin: Cli) -> xp.Experiment:
    assert run_admin(*CREATE).exit_code == 0
    experiment: xp.Experiment = admin.experiments.held["experiments/trie-vs-hybrid"]
    return experiment


def test_create_from_options(made: xp.Experiment) -> None:
    control, hybrid = made.arms
    assert (control.id, control.drafting.strategy, control.HasField("weight")) == ("control", "trie", False)
    assert (hybrid.id, hybrid.drafting.strategy, hybrid.weight) == ("hybrid", "hybrid", 2)
    assert dict(hybrid.drafting.options) == {"branch_length": 8, "learn": "both"}
    assert (hybrid.drafting.max_nodes, hybrid.memory) == (16, xp.ARM_MEMORY_FORKED)
    assert (made.coverage, made.unit, [*made.tenants]) == (0.5, xp.EXPERIMENT_UNIT_SESSION, ["acme", "beta"])
    assert made.burn_in.seconds == 300
    assert made.state == xp.EXPERIMENT_STATE_DRAFT


def test_create_from_a_file_with_options(admin: FakeAdmin, run_admin: Cli, tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("name: experiments/x\ncoverage: 0.1\nstate: running\narms: [{id: a}, {id: b, memory: forked}]\n")
    create = ("experiment", "create", "-f", str(file), "--coverage", "0.2")
    assert (run_admin(*create, "--dry-run").exit_code, admin.experiments.held) == (0, {})
    assert run_admin(*create).exit_code == 0
    stored = admin.experiments.held["experiments/x"]
    assert (stored.coverage, stored.state) == (0.2, xp.EXPERIMENT_STATE_DRAFT)
    assert stored.arms[1].memory == xp.ARM_MEMORY_FORKED


@pytest.mark.parametrize(
    ("options", "problem", "status"),
    [
        (["--arm", "a"], "--arm: 'a' must be NAME=STRATEGY[,OPTION=VALUE]...", 2),
        (["--arm", "a=trie,x"], "--arm: 'a=trie,x' must be NAME=STRATEGY", 2),
        (["--arm", "a=trie", "--arm", "a=none"], "--arm: two arms are named a", 2),
        (["--arm", "a=trie", "--weight", "b=2"], "--weight: there is no arm 'b'; there are: a", 2),
        (["--arm", "a=trie", "--weight", "a=much"], "--weight: 'a=much' must be NAME=NUMBER", 2),
        (["--arm", "a=trie", "--fork", "b"], "--fork: there is no arm 'b'; there are: a", 2),
        (["--weight", "a=2"], "--weight: needs --arm", 2),
        (["--arm", "a=", "--arm", "b=", "--unit", "user"], "unit: 'user' is unknown; there are: request, session", 2),
        (["--arm", "a=", "--arm", "b=", "--burn-in", "5"], "burnIn: '5' is no duration", 2),
        (["--arm", "a=trie"], "experiment.arms: 1 of them; 2 to 8 are needed", 1),
    ],
)
def test_wrong_options(admin: FakeAdmin, run_admin: Cli, options: list[str], problem: str, status: int) -> None:
    result = run_admin("experiment", "create", "x", *options)
    assert result.stderr.startswith(f"error: {problem}")
    assert (result.stderr.count("\n"), result.exit_code) == (1, status)
    assert admin.experiments.held == {}


def test_list_and_show(made: xp.Experiment, run_admin: Cli) -> None:
    head, row = run_admin("experiment", "list").stdout.splitlines()
    assert head.split()[:5] == ["experiment", "state", "arms", "unit", "coverage"]
    assert row.split() == ["trie-vs-hybrid", "draft", "control,", "hybrid", "session", "50%", "acme,", "beta", "-", "-"]
    [listed] = json.loads(run_admin("experiment", "list", "--json").stdout)["experiments"]
    assert ParseDict(listed, xp.Experiment()) == made
    shown = run_admin("experiment", "show", made.name.partition("/")[2]).stdout
    assert "# state: EXPERIMENT_STATE_DRAFT\n" in shown
    assert yaml.safe_load(shown)["arms"][1]["drafting"]["options"] == {"branch_length": 8, "learn": "both"}


def test_set(admin: FakeAdmin, made: xp.Experiment, run_admin: Cli) -> None:
    settings = ["coverage=1", "tenants=acme", "guardrails.reportOnly=true", "burnIn=null"]
    assert run_admin("experiment", "set", "trie-vs-hybrid", *settings).exit_code == 0
    stored = admin.experiments.held[made.name]
    assert (stored.coverage, [*stored.tenants], stored.guardrails.report_only) == (1, ["acme"], True)
    assert not stored.HasField("burn_in")
    assert "arms is a list" in run_admin("experiment", "set", "trie-vs-hybrid", "arms.a=1").stderr
    assert run_admin("experiment", "set", "none", "coverage=1").stderr == "error: experiments/none: does not exist\n"
    assert [*admin.experiments.held] == [made.name]


def test_start_stop_conclude_delete(admin: FakeAdmin, made: xp.Experiment, run_admin: Cli) -> None:
    name = "trie-vs-hybrid"
    assert run_admin("experiment", "start", name, "--dry-run").stdout == f"experiment {name} would be running\n"
    assert run_admin("experiment", "start", name).stdout == f"experiment {name} is running\n"
    assert run_admin("experiment", "start", name).stderr == f"error: experiments/{name}: state: not allowed\n"
    stopped = json.loads(run_admin("experiment", "stop", name, "--json").stdout)
    assert stopped["state"] == "EXPERIMENT_STATE_STOPPED"
    assert run_admin("experiment", "conclude", name).stderr == f"error: experiments/{name}: no arm is better\n"
    concluded = run_admin("experiment", "conclude", name, "--winner", "hybrid")
    assert concluded.stdout == f"experiment {name} is concluded, winner hybrid\n"
    assert run_admin("experiment", "delete", name, stdin="y\n").exit_code == 0
    assert admin.experiments.held == {}


FASTER = xp.Conclusion(kind=xp.CONCLUSION_KIND_FASTER, text="hybrid is faster than control.")
METRICS = {
    "decode_seconds_per_token": "decode time per token",
    "tokens_per_step": "tokens per step",
    "ttft_seconds_p50": "ttft p50",
}


@pytest.fixture
def reported(admin: FakeAdmin, made: xp.Experiment) -> xp.ExperimentReport:
    report = admin.experiments.reports[made.name] = xp.ExperimentReport(
        experiment=made, servers=2, conclusions=[FASTER]
    )
    for key, title in METRICS.items():
        report.metrics.add(key=key, title=title)
    for arm, seconds in (("control", 0.05), ("hybrid", 0.04)):
        row = report.arms.add(arm=arm, units=1200, requests=2400, audited=10)
        row.metrics.update(zip(METRICS, (seconds, 1.8, 1.25), strict=True))
    metric = "decode_seconds_per_token"
    bounds = {"change": -0.2, "low": -0.25, "high": -0.15}
    report.comparisons.add(arm="hybrid", metric=metric, verdict=xp.VERDICT_BETTER, **bounds)
    report.comparisons.add(arm="hybrid", metric="tokens_per_step", verdict=xp.VERDICT_OPEN)
    report.history.add().comparisons.add(arm="hybrid", metric=metric, change=-0.2)
    return report


def test_report(reported: xp.ExperimentReport, run_admin: Cli) -> None:
    value = json.loads(run_admin("experiment", "report", "trie-vs-hybrid", "--json").stdout)
    assert ParseDict(value, xp.ExperimentReport()) == reported
    assert (value["arms"][0]["errors"], value["sampleRatioMismatch"]) == (0, False)
    shown = run_admin("experiment", "report", "trie-vs-hybrid").stdout
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert lines[0].startswith("trie-vs-hybrid: draft; unit session; 50% of them; tenants acme, beta; the first 5m not")
    assert lines[0].endswith("2 servers")
    for line in (
        "units 1,200 1,200",
        "errors 0 0",
        "audited 10 10",
        "decode time per token 50 ms 40 ms",
        "tokens per step 1.800 1.800",
        "ttft p50 1.250 s 1.250 s",
        "hybrid decode time per token -20.0% -25.0% to -15.0% better",
        "hybrid tokens per step - - open",
        "hybrid is faster than control.",
    ):
        assert line in lines
    reported.sample_ratio_mismatch = True
    reported.violations.add(arm="hybrid", guardrail="ttft", reason="TTFT [bold]is 30% longer")
    shown = run_admin("experiment", "report", "trie-vs-hybrid").stdout
    assert "nothing may be concluded" in shown
    assert "guardrail ttft of hybrid: TTFT [bold]is 30% longer\n" in shown
    colours = run_admin("experiment", "report", "trie-vs-hybrid", NO_COLOR="", FORCE_COLOR="1").stdout
    assert "\x1b[32mbetter" in colours
    for part in ("arms", "comparisons"):
        reported.ClearField(part)
    assert run_admin("experiment", "report", "trie-vs-hybrid").stdout.endswith("hybrid is faster than control.\n")


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_watch_shows_the_report_again_until_ctrl_c(
    reported: xp.ExperimentReport, run_admin: Cli, monkeypatch: pytest.MonkeyPatch, form: list[str]
) -> None:
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        reported.conclusions[0].text = "hybrid is slower now."
        if len(waits) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("draftwood_client.cli.admin.tables.time.sleep", wait)
    result = run_admin("experiment", "report", "trie-vs-hybrid", "--watch", *form)
    assert (waits, result.exit_code, result.stderr) == ([3.0, 3.0], 0, "")
    assert result.stdout.index("hybrid is faster than control.") < result.stdout.index("hybrid is slower now.")
