"""The requests of `draftwood bench load`."""

from __future__ import annotations

from draftwood_benchmarks.load.questions import Questions
from tests.client.fake_server import FakeServer


async def test_no_tenant_is_asked_a_question_twice_and_each_has_learned_first() -> None:
    with FakeServer() as server:
        questions = Questions(server.target, ["a", "b", "c"], ["d", "e"], {"max_tokens": 8})
        assert questions.drafted() is None
        await questions.prepare(5)
        learned = [(request.tenant, request.text) for request in server.requests]
    requests = []
    while (request := questions.drafted()) is not None:
        requests.append((request.options["tenant"], request.prompt))
    assert len(requests) == len(set(requests)) == 6
    tenants = {tenant for tenant, _ in requests}
    assert len(tenants) == 2
    assert sorted(learned) == sorted((tenant, text) for tenant in tenants for text in ("d", "e"))
