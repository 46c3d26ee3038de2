"""Replicas of vLLM and of our own server on one store: `make test-vllm`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from draftwood_benchmarks.harness.servers import running_server
from draftwood_client import Client
from tests.memory.servers import Valkey
from tests.vllm.engine import Engine, request, running_engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
FIRST, SECOND = [1, *range(100, 140)], [1, *range(300, 330)]


@pytest.fixture(scope="module")
def store() -> Iterator[Valkey]:
    with Valkey() as server:
        yield server


def drafted(engine: Engine, name: str, prompt: list[int], tenant: str) -> int:
    """Of the second of two requests at once: the first one brings the memory."""
    engine.run(request(f"{name} brings", [1, 5, 6], 0, 12, draftwood_tenant=tenant, draftwood_learn=0))
    engine.state()
    run = engine.run(request(name, prompt, 0, 40, draftwood_tenant=tenant, draftwood_learn=0))
    return int(run["drafted"].get(name, 0))


def test_vllm_and_our_server_share_a_tenants_memory(store: Valkey) -> None:
    with running_server("--store", store.url, "--dtype", "float32") as target, Client(target, tenant="acme") as client:
        answer = client.generate(FIRST, max_tokens=40, ignore_eos=True)
        with running_engine(DRAFTWOOD_STORE=store.url) as engine:
            streams = [*map(bytes.decode, store.client.scan_iter("dw:{t:acme}:3:*"))]
            assert [key.split(":")[4] for key in streams] == [engine.state()["fingerprint"]]
            assert drafted(engine, "from the server", FIRST, "acme") > 15
            assert drafted(engine, "of another tenant", FIRST, "other") < 15
            run = engine.run(request("vllm's own", SECOND, 0, 40, draftwood_tenant="acme"))
            assert engine.state()["waiting"] == 0
        again = client.generate(SECOND, max_tokens=40, ignore_eos=True)
        assert again.drafting.accepted_tokens > 15
        assert len(run["outputs"]["vllm's own"][0]) == 40
        assert len(answer.token_ids) == 40


def test_a_restart_keeps_what_was_learned(store: Valkey) -> None:
    prompt = [1, *range(500, 520)]
    with running_engine(DRAFTWOOD_STORE=store.url, DRAFTWOOD_TENANT="team") as engine:
        engine.run(request("1", prompt, 0, 40))
    with running_engine(DRAFTWOOD_STORE=store.url, DRAFTWOOD_TENANT="team") as engine:
        assert drafted(engine, "2", prompt, "team") > 15
