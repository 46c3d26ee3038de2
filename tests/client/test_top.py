"""`draftwood top`: rates, sums over servers, servers that go away, the screen, JSON, roles, keys and Ctrl-C."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from draftwood.admin.v1 import status_pb2 as pb
from draftwood_client.admin.client import AdminClient
from draftwood_client.cli import build_app
from draftwood_client.cli.top import replica
from draftwood_client.cli.top.replica_watcher import ReplicaWatcher
from draftwood_client.cli.top.screen import Screen, Sort, sparkline
from draftwood_client.cli.top.snapshot import Snapshot
from tests.client.fake_status import FakeStatus, sample, tenant
from tests.client.terminal import Terminal


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood_client.cli.top.replica_watcher._RETRY_SECONDS", 0.1)


def run(*args: str, **env: str) -> Result:
    settings = {"NO_COLOR": "1", "FORCE_COLOR": "", "COLUMNS": "100", **env}
    return CliRunner().invoke(build_app(), ["top", *args], env=settings, catch_exceptions=False)


def as_json(*args: str) -> dict[str, Any]:
    result = run("--once", "--json", *args)
    assert result.exit_code == 0, result.output
    values: dict[str, Any] = json.loads(result.stdout)
    return values


def watching(*servers: FakeStatus) -> ReplicaWatcher:
    return ReplicaWatcher([one.target for one in servers], AdminClient, 0.5)


def until(watch: ReplicaWatcher, is_so: Callable[[Snapshot], bool]) -> Snapshot:
    end = time.monotonic() + 20
    while not is_so(found := watch.snapshot()):
        assert time.monotonic() < end, found
        time.sleep(0.02)
    return found


def test_the_client_reads_every_field() -> None:
    message = sample(10)
    with FakeStatus(message) as server, AdminClient(server.target) as client:
        status = client.status()
        assert next(client.watch_status(0.5)) == status
        assert server.intervals == [0.5]
    assert (status.state, status.model, status.uptime) == ("serving", "demo", 10.0)
    assert status.time.timestamp() == 1_800_000_000
    assert [one.tenant for one in status.tenants] == ["acme", "globex"]
    assert status.load is not None
    assert {field.name for field in pb.LoadStatus.DESCRIPTOR.fields} == set(type(status.load).__slots__)
    assert (status.load.busy, status.load.store.lag, status.load.drafting[0].draft_time) == (5.0, 0.012, 0.02)
    assert status.load.accepted_by_depth == (30, 20, 10)


def test_rates_are_between_the_figures_and_sum_over_servers() -> None:
    with FakeStatus(sample(10), sample(12)) as one, FakeStatus(sample(3), sample(4)) as other:
        found = as_json("--target", one.target, "--target", other.target)
    assert found["tokens_per_second"] == pytest.approx(240)
    load = found["load"]
    assert (load["running"], load["max_running"], load["kv_used"], load["kv_cached"]) == (4, 32, 0.3, 0.2)
    assert load["acceptance_length"] == pytest.approx(4)
    assert (load["busy"], load["draft_tokens_per_step"]) == pytest.approx((0.5, 20))
    assert (load["prompt_tokens_per_second"], load["cached_prompt_share"]) == pytest.approx((800, 0.25))
    assert [(one["target"], one["state"]) for one in found["replicas"]] == [
        (one.target, "serving"),
        (other.target, "serving"),
    ]
    [strategy] = found["strategies"]
    assert strategy["tokens_per_second"] == pytest.approx(80)
    assert (strategy["acceptance_length"], strategy["accepted_share"]) == pytest.approx((4, 0.15))
    assert strategy["draft_tokens_per_step"] == pytest.approx(20)
    assert strategy["draft_seconds_per_step"] == pytest.approx(0.0002)
    assert found["sources"] == [{"source": "trie", "draft_tokens_per_second": 200.0, "accepted_share": 0.25}]
    assert [(row["tenant"], round(row["tokens_per_second"])) for row in found["tenants"]] == [
        ("acme", 200),
        ("globex", 40),
    ]
    assert (found["store"]["down"], found["store"]["pending_records"]) == (0, 6)


def test_a_tenant_admin_sees_its_tenant_only() -> None:
    with FakeStatus(*(sample(at, tenant("acme", at), operator=False) for at in (1, 2))) as server:
        found = as_json("--target", server.target)
        shown = run("--once", "--target", server.target).stdout
    assert (found["load"], found["store"], found["strategies"]) == (None, None, [])
    assert found["tokens_per_second"] == pytest.approx(100)
    assert "acme" in shown
    assert "KV" not in shown


def test_a_server_that_was_started_anew_gives_no_wild_rate() -> None:
    with FakeStatus(sample(5000), sample(1), sample(2)) as server, watching(server) as watch:
        assert until(watch, lambda shown: shown.tokens_per_second > 0).tokens_per_second == pytest.approx(120)


def test_rates_are_of_the_latest_seconds() -> None:
    early = [sample(at, tenant("acme", at, rate=1000)) for at in (0, 100)]
    late = [sample(100 + at, tenant("acme", 1000 + at, rate=100)) for at in range(1, 9)]
    with FakeStatus(*early, *late) as server, watching(server) as watch:
        server.watched.wait(10)
        assert until(watch, lambda shown: round(shown.tokens_per_second) == 100)


def test_a_server_goes_away_and_comes_back() -> None:
    steady = sample(1), sample(2)
    with FakeStatus(*steady) as can_drop_part, FakeStatus(*steady) as server, watching(can_drop_part, server) as watch:
        until(watch, lambda shown: [one.state for one in shown.replicas] == ["serving", "serving"])
        server.stop()
        away = until(watch, lambda shown: shown.replicas[1].state == "away")
        assert away.replicas[1].problem
        assert away.replicas[1].uptime is None
        assert [round(one.tokens_per_second) for one in away.tenants] == [100, 20]
        server.restart()
        until(watch, lambda shown: shown.replicas[1].state == "serving")


def test_an_engine_that_reports_nothing_is_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeStatus(sample(1), sample(2)) as server, watching(server) as watch:
        until(watch, lambda shown: shown.replicas[0].state == "serving" and shown.tokens_per_second > 0)
        monkeypatch.setattr(replica, "STALLED_SECONDS", 1.0)
        stalled = until(watch, lambda shown: shown.replicas[0].state == "stalled")
        assert stalled.tokens_per_second == 0
        assert "stalled" in "\n".join(lines(Screen(stalled)))


def test_a_server_that_cannot_be_reached() -> None:
    with FakeStatus() as server:
        target = server.target
    result = run("--once", "--target", target)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ")
    with FakeStatus(sample(1), sample(2)) as can_drop_part:
        found = as_json("--target", can_drop_part.target, "--target", target)
    assert [one["state"] for one in found["replicas"]] == ["serving", "away"]


@pytest.mark.parametrize("code", [grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED])
@pytest.mark.system
def test_a_caller_who_may_not_watch(code: grpc.StatusCode) -> None:
    with FakeStatus(error=(code, "not for you")) as server:
        result = run("--once", "--target", server.target)
        assert (result.exit_code, result.stderr) == (1, f"error: {server.target}: not for you\n")
        with Terminal("top", target=server.target) as terminal:
            terminal.wait_for("not for you")
            assert terminal.end() == 1


def test_one_of_several_servers_refuses() -> None:
    error = (grpc.StatusCode.UNIMPLEMENTED, "older")
    with FakeStatus(sample(1)) as server, FakeStatus(error=error) as older, watching(server, older) as watch:
        found = until(watch, lambda shown: [one.state for one in shown.replicas] == ["serving", "away"])
        assert found.replicas[1].problem.endswith("older")


@pytest.mark.parametrize("interval", ["0.4", "61", "nan"])
def test_a_bad_interval(interval: str) -> None:
    result = run("--interval", interval)
    assert result.exit_code == 2
    assert result.stderr == f"error: interval: {float(interval):g} is not allowed; it must lie in [0.5, 60]\n"


@pytest.fixture
def shown() -> Snapshot:
    tenants = {name: (position + 1) * 40 for position, name in enumerate("abcdefghijklmnopqrstuvwxyz")}
    samples = [
        sample(at, *(tenant(f"tenant-{name}", at, rate, waiting=rate) for name, rate in tenants.items()))
        for at in (1, 2)
    ]
    with FakeStatus(*samples) as server, watching(server) as watch:
        return until(watch, lambda shown: shown.tokens_per_second > 0)


def lines(screen: Screen, width: int = 80, height: int = 24) -> list[str]:
    console = Console(width=width, height=height, color_system=None)
    with console.capture() as capture:
        console.print(screen)
    return capture.get().splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 30), (200, 60)])
def test_the_screen_fits_and_uses_the_room(shown: Snapshot, width: int, height: int) -> None:
    printed = lines(Screen(shown, [1, 2, 3], live=True), width, height)
    assert len(printed) == height if height < 40 else len(printed) <= height
    assert max(map(len, printed)) <= width
    text = "\n".join(printed)
    for part in ("14,040 tokens/s", "26 of 16 running", "hybrid", "trie 25% of 100/s"):
        assert part in text
    assert "acceptance 4.00   20.0 drafted/step   prompts 400/s, 25% cached" in text
    for part in ("tenant-z", "store up, lag 12 ms, 3 pending", "0 differences, 2 ties", "q quit"):
        assert part in text
    assert ("more tenants" in text) == (height < 40)


def test_what_idle_work_lost_stands_beside_the_audits(shown: Snapshot) -> None:
    assert "failed" not in "\n".join(lines(Screen(shown)))
    assert shown.load is not None
    lost = replace(shown, load=replace(shown.load, failed_audits=1_000, failed_own_texts=2))
    assert "audits 40, 0 differences, 2 ties, 1,000 failed, 2 own texts failed" in "\n".join(lines(Screen(lost)))


def test_tenants_are_sorted(shown: Snapshot) -> None:
    def first(sort: Sort) -> str:
        printed = lines(Screen(shown, sort=sort))
        return printed[next(number for number, line in enumerate(printed) if line.startswith("TENANT")) + 1].split()[0]

    assert [first(sort) for sort in Sort] == ["tenant-z", "tenant-z", "tenant-z", "tenant-a", "tenant-a"]


def test_names_are_no_terminal_commands_and_no_markup() -> None:
    name = "\x1b[31m[bold]"
    with FakeStatus(*(sample(at, tenant(name, at)) for at in (1, 2))) as server:
        printed = run("--once", "--target", server.target).stdout
    assert "\x1b" not in printed
    assert "\\x1b[31m[bold]" in printed


def test_a_sparkline() -> None:
    assert sparkline([0, 1, 4, 8]) == " ▁▄█"
    assert sparkline([0, 0]) == "  "
    assert sparkline([]) == ""


@pytest.mark.system
def test_the_live_screen_takes_keys_and_ends() -> None:
    with FakeStatus(sample(1), sample(2)) as server:
        with Terminal("top", target=server.target) as terminal:
            terminal.wait_for("acme")
            terminal.wait_for("sorted by tokens")
            terminal.type("n")
            terminal.wait_for("sorted by name")
            terminal.type("q")
            assert terminal.end() == 0
        with Terminal("top", target=server.target) as terminal:
            terminal.wait_for("sorted by tokens")
            terminal.interrupt()
            assert terminal.end() == 130
            terminal.read_rest()
            assert "Traceback" not in terminal.shown


@pytest.mark.system
def test_lines_of_json_until_the_reader_ends() -> None:
    arguments = ("top", "--json", "--interval", "0.5")
    with FakeStatus(sample(1), sample(2)) as server, Terminal(*arguments, target=server.target) as terminal:
        for _ in range(2):
            terminal.wait_for('"tokens_per_second": 120.0')
            terminal.wait_for("\n")
        terminal.interrupt()
        assert terminal.end() == 130


def test_a_pipe_gets_one_snapshot() -> None:
    with FakeStatus(sample(1), sample(2)) as server:
        result = run("--target", server.target)
        assert result.exit_code == 0
        assert "acme" in result.stdout
        assert "q quit" not in result.stdout
        assert os.linesep * 3 not in result.stdout
