"""The real engine and the bundled model over gRPC: every arm of an experiment writes what plain decoding writes, which
audits confirm; and audits find a verification that is broken.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import torch
from google.protobuf.json_format import ParseDict

from draftwood.admin.v1 import experiments_pb2 as xp
from draftwood.admin.v1 import experiments_pb2_grpc
from draftwood.v1 import generation_pb2 as pb
from draftwood.v1 import generation_pb2_grpc
from draftwood_benchmarks.harness.prompts import read_questions
from draftwood_client import AsyncClient
from draftwood_model_runner.engine import Engine, EngineConfig
from draftwood_model_runner.sampling import verification
from draftwood_model_runner.sampling.token_sampler import TokenSampler
from draftwood_model_runner.sampling.verification import AcceptedPath
from draftwood_service.rpc.server import RunningServer
from draftwood_service.serving import ServedModel
from draftwood_service.settings import Settings
from draftwood_strategies.base import StepFeedback
from draftwood_tenants.experiments.assignment import Split
from tests.model_runner.families import served
from tests.service.fakes import check_idle, started_server, until

ARMS = [
    {"id": "trie", "drafting": {"strategy": "trie"}},
    {"id": "hybrid", "drafting": {"strategy": "hybrid", "maxNodes": 16}},
    {"id": "off", "drafting": {"maxNodes": 0}},
]
QUESTIONS = read_questions()[0][:6]


@asynccontextmanager
async def serving(adaptive_budget: bool) -> AsyncIterator[RunningServer]:
    """A server that audits all answers."""
    torch.set_num_threads(1)
    engines: list[Engine] = []

    def make_engine() -> Engine:
        config = EngineConfig(max_running=4, max_draft_nodes=32, adaptive_budget=adaptive_budget)
        engines.append(Engine(served("bundled"), config))
        return engines[0]

    settings = Settings(port=0, max_draft_nodes=32, drain_grace=0.1, audit_share=1.0)
    server = await started_server(settings, ServedModel.of(served("bundled")), make_engine)
    try:
        yield server
    finally:
        await server.stop()
    await check_idle(server.bridge, engines[0])


def audited(server: RunningServer) -> int:
    return sum(count.audited for count in server.audits.counts.values())


async def generate(stub: Any, **fields: Any) -> tuple[str, list[int], pb.Finished]:
    """The arm, the tokens and the end."""
    events = [event async for event in stub.GenerateStream(pb.GenerateRequest(tenant="acme", **fields))]
    return events[0].started.arm, [t for event in events for t in event.delta.token_ids], events[-1].finished


async def test_answers_in_every_arm_are_those_of_plain_decoding() -> None:
    seen: dict[str, list[pb.Finished]] = {str(arm["id"]): [] for arm in ARMS}
    async with serving(adaptive_budget=True) as server, grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        admin: Any = experiments_pb2_grpc.ExperimentServiceStub(channel)
        experiment = ParseDict({"arms": ARMS}, xp.Experiment())
        await admin.CreateExperiment(xp.CreateExperimentRequest(experiment_id="x", experiment=experiment))
        started = await admin.StartExperiment(xp.StartExperimentRequest(name="experiments/x"))
        split = Split(bytes.fromhex(started.salt), (*seen,), (1.0,) * len(ARMS))
        units: dict[str, list[str]] = {arm: [] for arm in seen}
        for number in range(200):
            assignment = split.assign("acme", str(number))
            assert assignment is not None
            units[split.arms[assignment.arm]].append(str(number))
        for question in QUESTIONS[:2]:
            for sampling in (pb.SamplingOptions(), pb.SamplingOptions(temperature=1.0, seed=7)):
                fields: dict[str, Any] = {"text": question, "sampling": sampling}
                fields["stop"] = pb.StopOptions(max_tokens=30)
                arm, plain, _ = await generate(stub, **fields, drafting=pb.DraftOptions(enabled=False))
                assert not arm
                for expected, of_arm in units.items():
                    arm, tokens, end = await generate(stub, **fields, request_id=of_arm.pop())
                    assert arm == expected
                    assert tokens == plain, arm
                    seen[arm].append(end)
        accepted = {arm: sum(end.drafting.accepted_tokens for end in ends) for arm, ends in seen.items()}
        assert accepted["trie"] > 0 < accepted["hybrid"]
        assert accepted["off"] == 0
        drafted = sum(one.drafting.draft_tokens > 0 for ends in seen.values() for one in ends)
        await until(lambda: audited(server) >= drafted)
        report = await admin.GetExperimentReport(xp.GetExperimentReportRequest(name="experiments/x"))
    assert [row.requests for row in report.arms] == [len(ends) for ends in seen.values()]
    assert (sum(row.audited for row in report.arms), sum(row.differing for row in report.arms)) == (drafted, 0)
    for row in report.arms:
        assert (row.metrics["tokens_per_step"] > 1.02) == (row.arm != "off"), row
        assert 0 < row.metrics["decode_seconds_per_token"] < 1


async def test_answers_of_a_broken_verification_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an accepted draft, the least probable token is written."""
    walk = verification.walk_row

    def wrong(sampler: TokenSampler, feedback: StepFeedback, logits: torch.Tensor, row: int) -> AcceptedPath:
        path = walk(sampler, feedback, logits, row)
        if path.nodes and not sampler.ended:
            path.token_ids[-1] = int(logits[feedback.of_row(row).start + path.nodes[-1] + 1].argmin())
        return path

    monkeypatch.setattr(TokenSampler, "follows_predictions", False)
    monkeypatch.setattr(verification, "walk_row", wrong)
    async with serving(adaptive_budget=False) as server, AsyncClient(server.address, tenant="acme") as client:
        for number, question in enumerate(QUESTIONS):
            options = {"temperature": 1.0, "seed": number} if number % 2 else {}
            await client.generate(question, max_tokens=60, **options)  # type: ignore[arg-type]
        await until(lambda: audited(server) >= len(QUESTIONS) - 1)
    [counts] = server.audits.counts.values()
    assert (counts.failed, counts.dropped) == (0, 0)
    assert counts.differing - counts.ties >= len(QUESTIONS) // 2
    assert {found.tenant for found in server.audits.differences} == {"acme"}
    assert counts.largest_margin > 0.1
