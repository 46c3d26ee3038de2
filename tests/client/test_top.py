"""`draftwood top`: rates, sums over servers, servers that go away, the screen, JSON, roles, keys and Ctrl-C."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from rich.console import Console
from typer.testing import Result

from draftwood.admin.v1 import status_pb2 as pb
from draftwood_client import AdminClient, AsyncAdminClient
from draftwood_client.cli.top.replicas import Replica, ReplicaWatcher
from draftwood_client.cli.top.screen import Screen, Snapshot, Sort, snapshot
from tests.client.conftest import invoke
from tests.client.fake_server import WAIT_SECONDS
from tests.client.fake_status import FakeStatus, sample, tenant
from tests.client.terminal import Terminal


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries again soon; and waits longer for samples, of which a test's server sends few."""
    monkeypatch.setattr("draftwood_client.cli.top.replicas._RETRY_SECONDS", 0.1)
    for name in ("replicas.AWAY_SECONDS", "replicas.STALLED_SECONDS", "_ONCE_SECONDS"):
        monkeypatch.setattr(f"draftwood_client.cli.top.{name}", WAIT_SECONDS)


def run(*args: str) -> Result:
    return invoke("top", *args, COLUMNS="100")


def as_json(*args: str) -> dict[str, Any]:
    result = run("--once", "--json", *args)
    assert result.exit_code == 0, result.output
    values: dict[str, Any] = json.loads(result.stdout)
    return values


def watching(*servers: FakeStatus) -> ReplicaWatcher:
    return ReplicaWatcher([server.target for server in servers], AdminClient, 0.5)


def until(watch: ReplicaWatcher, is_so: Callable[[Snapshot], bool]) -> Snapshot:
    end = time.monotonic() + WAIT_SECONDS
    while not is_so(shown := snapshot(watch.views())):
        assert time.monotonic() < end, shown
        time.sleep(0.02)
    return shown


@pytest.fixture
def steady() -> Iterator[FakeStatus]:
    """Sends samples as long as a test may last."""
    with FakeStatus(*map(sample, range(1, 400)), pause=0.3) as server:
        yield server


async def test_both_clients_read_the_status() -> None:
    with FakeStatus(sample(10)) as server:
        with AdminClient(server.target) as client:
            status = client.status()
            assert next(client.watch_status(0.5)) == status == sample(10)
        async with AsyncAdminClient(server.target) as client:
            assert await client.status() == await anext(client.watch_status(0.5)) == status
    assert server.intervals == [0.5, 0.5]


def test_rates_are_between_the_figures_and_sum_over_servers() -> None:
    with FakeStatus(sample(10), sample(12)) as first, FakeStatus(sample(3), sample(4)) as other:
        printed = as_json("--target", first.target, "--target", other.target)
    assert printed["tokens_per_second"] == pytest.approx(240)
    load = printed["load"]
    assert (load["running"], load["max_running"], load["kv_used"], load["kv_cached"]) == (4, 32, 0.3, 0.2)
    assert load["acceptance_length"] == pytest.approx(4)
    assert (load["busy"], load["draft_tokens_per_step"]) == pytest.approx((0.5, 20))
    assert (load["prompt_tokens_per_second"], load["cached_prompt_share"]) == pytest.approx((800, 0.25))
    assert [replica["target"] for replica in printed["replicas"]] == [first.target, other.target]
    assert {replica["state"] for replica in printed["replicas"]} == {"serving"}
    [strategy] = printed["strategies"]
    assert strategy["tokens_per_second"] == pytest.approx(80)
    assert (strategy["acceptance_length"], strategy["accepted_share"]) == pytest.approx((4, 0.15))
    assert strategy["draft_tokens_per_step"] == pytest.approx(20)
    assert strategy["draft_seconds_per_step"] == pytest.approx(0.0002)
    assert printed["sources"] == [{"source": "trie", "draft_tokens_per_second": 200.0, "accepted_share": 0.25}]
    rates = {row["tenant"]: round(row["tokens_per_second"]) for row in printed["tenants"]}
    assert rates == {"acme": 200, "globex": 40}
    assert (printed["store"]["down"], printed["store"]["pending_records"]) == (0, 6)


def test_a_tenant_admin_sees_its_tenant_only() -> None:
    with FakeStatus(*(sample(at, tenant("acme", at), operator=False) for at in (1, 2))) as server:
        printed = as_json("--target", server.target)
        result = run("--target", server.target)  # a pipe gets one snapshot
    assert (result.exit_code, os.linesep * 3 in result.stdout, "q quit" in result.stdout) == (0, False, False)
    assert (printed["load"], printed["store"], printed["strategies"]) == (None, None, [])
    assert printed["tokens_per_second"] == pytest.approx(100)
    assert "acme" in result.stdout
    assert "KV" not in result.stdout


def seen(*samples: pb.ServerStatus) -> Snapshot:
    """What is shown of a server that has sent these samples."""
    replica = Replica("x:1", 0.5)
    for status in samples:
        replica.add_sample(status)
    return snapshot([replica.view()])


def test_rates_are_of_the_latest_seconds_since_the_start() -> None:
    assert seen(sample(5000), sample(1), sample(2)).tokens_per_second == pytest.approx(120)
    early = [sample(at, tenant("acme", at, rate=1000)) for at in (0, 100)]
    late = [sample(100 + at, tenant("acme", 1000 + at, rate=100)) for at in range(1, 9)]
    assert round(seen(*early, *late).tokens_per_second) == 100


def test_a_server_goes_away_and_comes_back() -> None:
    samples = sample(1), sample(2)
    with FakeStatus(*samples) as stays, FakeStatus(*samples) as server, watching(stays, server) as watch:
        until(watch, lambda shown: round(shown.tokens_per_second) == 240)
        server.stop()
        away = until(watch, lambda shown: shown.replicas[1]["state"] == "away")
        assert away.replicas[1]["problem"]
        assert away.replicas[1]["uptime"] is None
        assert [round(row["tokens_per_second"]) for row in away.tenants] == [100, 20]
        server.restart()
        until(watch, lambda shown: shown.replicas[1]["state"] == "serving")


def test_an_engine_that_reports_nothing_is_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood_client.cli.top.replicas.STALLED_SECONDS", -1.0)
    stalled = seen(sample(1), sample(2))
    assert (stalled.replicas[0]["state"], stalled.tokens_per_second) == ("stalled", 0)
    assert "stalled" in "\n".join(lines(Screen(stalled, [0, 0])))


def test_servers_that_cannot_be_reached_or_refuse(nobody: str) -> None:
    result = run("--once", "--target", nobody)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ")
    with FakeStatus(error=(grpc.StatusCode.PERMISSION_DENIED, "not for you")) as server:
        result = run("--once", "--target", server.target)
    assert (result.exit_code, result.stderr) == (1, f"error: {server.target}: not for you\n")
    error = (grpc.StatusCode.UNIMPLEMENTED, "older")
    with FakeStatus(sample(1), sample(2)) as server, FakeStatus(error=error) as older:
        printed = as_json("--target", server.target, "--target", nobody, "--target", older.target)
    assert [replica["state"] for replica in printed["replicas"]] == ["serving", "away", "away"]
    assert printed["replicas"][2]["problem"].endswith("older")


def test_a_bad_interval() -> None:
    for interval in ("0.4", "61", "nan"):
        result = run("--interval", interval)
        assert result.stderr == f"error: interval: {interval} is not allowed; it must lie in [0.5, 60]\n"
        assert result.exit_code == 2


@pytest.fixture
def shown() -> Snapshot:
    tenants = {name: (position + 1) * 40 for position, name in enumerate("abcdefghijklmnopqrstuvwxyz")}

    def at(seconds: float) -> pb.ServerStatus:
        return sample(
            seconds, *(tenant(f"tenant-{name}", seconds, rate, waiting=rate) for name, rate in tenants.items())
        )

    return seen(at(1), at(2))


def lines(screen: Screen, width: int = 80, height: int = 24) -> list[str]:
    console = Console(width=width, height=height, color_system=None)
    with console.capture() as capture:
        console.print(screen)
    return capture.get().splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60)])
def test_the_screen_fits_and_uses_the_room(shown: Snapshot, width: int, height: int) -> None:
    printed = lines(Screen(shown, [0, 1, 4, 8], live=True), width, height)
    assert len(printed) == height if height < 40 else len(printed) <= height
    assert max(map(len, printed)) <= width
    text = "\n".join(printed)
    for part in (
        *("14,040 tokens/s", "26 of 16 running", "hybrid", "trie 25% of 100/s", "tenant-z", "q quit", " ▁▄█"),
        "acceptance 4.00   20.0 drafted/step   prompts 400/s, 25% cached",
        *("store up, lag 12 ms, 3 pending; 2 memories, 5,000 tokens, 1 MiB", "0 differences, 2 ties"),
    ):
        assert part in text
    assert ("more tenants" in text, "failed" in text) == (height < 40, False)


def test_tenants_are_sorted_and_what_idle_work_lost_stands_beside_the_audits(shown: Snapshot) -> None:
    def first(sort: Sort) -> str:
        printed = lines(Screen(shown, sort=sort))
        return printed[next(number for number, line in enumerate(printed) if line.startswith("TENANT")) + 1].split()[0]

    assert [first(sort) for sort in Sort] == ["tenant-z", "tenant-z", "tenant-z", "tenant-a", "tenant-a"]
    assert shown.load is not None
    lost = replace(shown, load={**shown.load, "failed_audits": 1_000, "failed_own_texts": 2})
    assert "audits 40, 0 differences, 2 ties, 1,000 failed, 2 own texts failed" in "\n".join(lines(Screen(lost)))


def test_names_are_no_terminal_commands_and_no_markup() -> None:
    samples = [sample(at, tenant("\x1b[31m[bold]", at)) for at in (1, 2)]
    printed = "\n".join(lines(Screen(seen(*samples))))
    assert ("\x1b" in printed, "\\x1b[31m[bold]" in printed) == (False, True)


@pytest.mark.system
@pytest.mark.parametrize("status", [0, 130], ids=["q", "Ctrl-C"])
def test_the_live_screen_takes_keys_and_ends(steady: FakeStatus, status: int) -> None:
    with Terminal("top", target=steady.target) as terminal:
        terminal.wait_for("acme")
        terminal.wait_for("sorted by tokens")
        terminal.type("n")
        terminal.wait_for("sorted by name")
        if status:
            terminal.interrupt()
        else:
            terminal.type("q")
        assert terminal.end() == status
        terminal.read_rest()
        assert "Traceback" not in terminal.shown


@pytest.mark.system
def test_lines_of_json_until_the_reader_ends(steady: FakeStatus) -> None:
    with Terminal("top", "--json", "--interval", "0.5", target=steady.target) as terminal:
        for _ in range(2):
            terminal.wait_for('"tokens_per_second": 120.0')
            terminal.wait_for("\n")
        terminal.interrupt()
        assert terminal.end() == 130
