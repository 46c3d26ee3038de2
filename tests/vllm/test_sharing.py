"""Replicas of vLLM and of our own server on one store: `make test-vllm`."""

from __future__ import annotations

import pytest

from draftwood_benchmarks.harness.servers import running_server
from draftwood_client import Client
from tests.memory.servers import Valkey, wait_for
from tests.vllm.engine import Engine, request, running_engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]
FIRST, SECOND, THIRD = [1, *range(100, 140)], [1, *range(300, 330)], [1, *range(500, 520)]


def drafted(engine: Engine, name: str, prompt: list[int], tenant: str) -> int:
    """Of the second of two requests at once: the first one brings the memory."""
    engine.run(request(f"{name} brings", [1, 5, 6], 0, 12, draftwood_tenant=tenant, draftwood_learn=0))
    engine.state()
    run = engine.run(request(name, prompt, 0, 40, draftwood_tenant=tenant, draftwood_learn=0))
    return int(run["drafted"].get(name, 0))


def test_vllm_and_our_server_share_a_tenants_memory_which_a_restart_keeps(server: Valkey) -> None:
    variables = {"DRAFTWOOD_STORE": server.url, "DRAFTWOOD_TENANT": "team"}
    with running_server("--store", server.url, "--dtype", "float32") as target, Client(target, tenant="acme") as client:
        answer = client.generate(FIRST, max_tokens=40, ignore_eos=True)
        assert len(answer.token_ids) == 40
        wait_for(lambda: any(server.client.scan_iter("dw:{t:acme}:3:*")), "the server's answer to be stored")
        with running_engine(**variables) as engine:
            streams = [*map(bytes.decode, server.client.scan_iter("dw:{t:acme}:3:*"))]
            assert [key.split(":")[4] for key in streams] == [engine.state()["fingerprint"]]
            assert drafted(engine, "from the server", FIRST, "acme") > 15
            assert drafted(engine, "of another tenant", FIRST, "other") < 15
            run = engine.run(request("vllm's own", SECOND, 0, 40, draftwood_tenant="acme"))
            assert len(run["outputs"]["vllm's own"][0]) == 40
            assert engine.state()["waiting"] == 0
            engine.run(request("the last one", THIRD, 0, 40))  # of the tenant of requests that name none

        def drafts() -> bool:
            again = client.generate(SECOND, max_tokens=40, ignore_eos=True, learn=False)
            return again.drafting.accepted_tokens > 15

        wait_for(drafts, "the server drafting from vLLM's answer", 60.0)
    with running_engine(**variables) as engine:
        assert drafted(engine, "after a restart", THIRD, "team") > 15
