"""A rolling restart of real replicas on a real store, under load."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from tests.system.rollout.load import Result, acceptance, different
from tests.system.rollout.names import NAME, NameServer
from tests.system.rollout.rollout import CONCURRENCY, Plan, roll_out


@pytest.mark.timeout(600)
def test_a_rolling_restart_loses_no_request_and_no_memory() -> None:
    report = roll_out(Plan(replicas=2))
    assert (report.errors, report.cut, report.different) == ([], 0, 0)
    assert report.requests >= 60
    assert report.exit_codes == [0, 0]
    assert report.acceptance_before > 1.5 * report.acceptance_cold
    assert report.acceptance_kept > 0.9


@pytest.mark.timeout(600)
def test_replacements_at_new_addresses_are_found_and_a_killed_replica_costs_its_running_answers_alone() -> None:
    report = roll_out(Plan(new_addresses=True, kill=True))
    assert (report.errors, report.different) == ([], 0)
    assert report.cut <= CONCURRENCY
    assert report.exit_codes == [0, 0]
    assert report.lookups > 0
    assert report.acceptance_kept > 0.9


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kill", [False, True])
@pytest.mark.parametrize("new_addresses", [False, True])
def test_a_rolling_restart_loses_none_of_1000_requests(new_addresses: bool, kill: bool) -> None:
    """The runs of docs/rollout.md; `pytest -rP` prints their figures."""
    report = roll_out(Plan(1000, questions=20, max_tokens=60, new_addresses=new_addresses, kill=kill))
    print(report)
    assert (report.errors, report.different) == ([], 0)
    assert report.requests >= 1000
    assert report.cut <= (CONCURRENCY if kill else 0)
    assert report.exit_codes == [0] * (2 if kill else 3)
    assert report.acceptance_kept > 0.9


def test_figures_of_results() -> None:
    results = [
        Result(0.0, 1.0, "q", "a", 30, 10),
        Result(0.0, 4.0, "q", error="x"),
        Result(0.0, 5.0, "q", "b", 10, 10),
        Result(0.0, 3.0, "p", "b", 20, 10),
    ]
    assert acceptance(results) == 2.0
    assert different(results) == 1
    assert acceptance([]) == 0.0


async def test_the_name_server_answers_with_its_hosts_of_the_moment() -> None:
    names = NameServer(["127.0.0.1", "127.0.0.2"])
    host, port = (await names.start()).split(":")
    labels = b"".join(bytes([len(one)]) + one.encode() for one in NAME.split("."))
    question = struct.pack("!6H", 7, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!2H", 1, 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.setblocking(False)
        loop = asyncio.get_running_loop()
        found = []
        for hosts in (["127.0.0.1", "127.0.0.2"], ["127.0.0.5"]):
            names.hosts = hosts
            await loop.sock_sendto(asking, question, (host, int(port)))
            answer = await asyncio.wait_for(loop.sock_recv(asking, 512), 10)
            assert struct.unpack("!6H", answer[:12]) == (7, 0x8180, 1, len(hosts), 0, 0)
            found.append([socket.inet_ntoa(answer[end - 4 : end]) for end in _ends(answer, len(hosts))])
    names.close()
    assert found == [["127.0.0.1", "127.0.0.2"], ["127.0.0.5"]]
    assert names.questions == 2


def _ends(answer: bytes, records: int) -> list[int]:
    """Where the records end, each of 16 bytes."""
    return [len(answer) - 16 * left for left in reversed(range(records))]
