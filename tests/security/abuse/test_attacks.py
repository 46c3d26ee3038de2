"""Attacks on a real service: typed statuses, and nobody else waits or is refused.

Only hangs and refusals fail a test, because other work on the machine makes others wait too. How long they waited is
printed: `ATTACK_SECONDS=10 pytest -rP -m system tests/security/abuse` on an idle machine gives the table of
docs/limits.md.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from draftwood_benchmarks.harness.report import percentile
from draftwood_benchmarks.harness.servers import GatewayProcess, ServerProcess, running_gateway, server_process
from tests.security.abuse.attacks import ATTACKS, FAIR_STREAMS, MAX_MESSAGE_BYTES, MOST_FILES, Attack, Statuses
from tests.security.abuse.looking import look_during
from tests.security.abuse.probes import settled_mib

SECONDS = float(os.environ.get("ATTACK_SECONDS", "2"))
MOST_WAIT = 5.0
"""Seconds for a health check or a first token; most attacks once took longer from everybody."""
MOST_GROWTH = 256.0
"""MiB that may be kept."""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    flags = ["--threads", "1", "--max-message-bytes", str(MAX_MESSAGE_BYTES), "--strategy", "none"]
    flags += ["--max-running", str(2 * FAIR_STREAMS)]
    with server_process(*flags) as running:
        yield running


@pytest.fixture(scope="module")
def gateway(server: ServerProcess) -> Iterator[GatewayProcess]:
    with running_gateway(server.target, most_files=MOST_FILES) as running:
        yield running


@pytest.mark.timeout(120)
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_an_attack_ends_with_a_status_and_harms_nobody_else(
    server: ServerProcess, gateway: GatewayProcess, attack: Attack
) -> None:
    attacked = gateway if attack.gateway else server

    async def run() -> Statuses:
        before = await settled_mib(attacked.pid, 0.0)
        seen, statuses = await look_during(attacked.target, attack, SECONDS)
        assert seen.refused == []
        assert max(seen.health) < MOST_WAIT
        assert max(seen.ttfts) < MOST_WAIT
        growth = await settled_mib(attacked.pid, 0.5) - before
        assert growth < MOST_GROWTH
        health, ttft = (1000 * (percentile(seconds, 99) or 0.0) for seconds in (seen.health, seen.ttfts))
        print(f"health p99 {health:.1f} ms, TTFT p99 {ttft:.1f} ms, {growth:.0f} MiB, {dict(statuses.counts)}")
        return statuses

    statuses = asyncio.run(run())
    assert statuses.untyped == ""
    assert statuses.counts.keys() <= attack.allowed
    lasts = ("fair", "10x-fair", "long-requests", "http-fair")
    assert statuses.counts or attack.name in lasts, "no call ended"
