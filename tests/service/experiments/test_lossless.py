"""The answers of every arm are those of plain decoding, with the real engine and the bundled model."""

from __future__ import annotations

from typing import Any

import grpc
import torch
from google.protobuf.json_format import ParseDict

from draftwood.admin.v1 import experiments_pb2 as xp
from draftwood.admin.v1 import experiments_pb2_grpc
from draftwood.v1 import generation_pb2 as pb
from draftwood.v1 import generation_pb2_grpc
from draftwood_benchmarks.harness.prompts import read_questions
from draftwood_model_runner.engine import Engine, EngineConfig
from draftwood_service.serving import ServedModel
from draftwood_service.settings import Settings
from draftwood_tenants.experiments.assignment import Split
from tests.model_runner.families import served
from tests.service.fakes import started_server, until

ARMS = [
    {"id": "trie", "drafting": {"strategy": "trie"}},
    {"id": "hybrid", "drafting": {"strategy": "hybrid", "maxNodes": 16}},
    {"id": "off", "drafting": {"maxNodes": 0}},
]
QUESTIONS = read_questions()[0][:2]


async def generate(stub: Any, **fields: Any) -> tuple[str, list[int], pb.Finished]:
    """The arm, the tokens and the end."""
    events = [event async for event in stub.GenerateStream(pb.GenerateRequest(tenant="acme", **fields))]
    return events[0].started.arm, [t for event in events for t in event.delta.token_ids], events[-1].finished


async def test_answers_in_every_arm_are_those_of_plain_decoding() -> None:
    torch.set_num_threads(1)
    engine_of = lambda: Engine(served("bundled"), EngineConfig(max_running=4, max_draft_nodes=32))  # noqa: E731
    settings = Settings(port=0, max_draft_nodes=32, drain_grace=0.1, audit_share=1.0)
    server = await started_server(settings, ServedModel.of(served("bundled")), engine_of)
    seen: dict[str, list[pb.Finished]] = {}
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
            admin: Any = experiments_pb2_grpc.ExperimentServiceStub(channel)
            experiment = ParseDict({"arms": ARMS}, xp.Experiment())
            await admin.CreateExperiment(xp.CreateExperimentRequest(experiment_id="x", experiment=experiment))
            started = await admin.StartExperiment(xp.StartExperimentRequest(name="experiments/x"))
            split = Split(bytes.fromhex(started.salt), tuple(str(arm["id"]) for arm in ARMS), (1.0,) * len(ARMS))
            units: dict[int, list[str]] = {0: [], 1: [], 2: []}
            for number in range(200):
                assignment = split.assign("acme", str(number))
                assert assignment is not None
                units[assignment.arm].append(str(number))
            for question in QUESTIONS:
                for sampling in (pb.SamplingOptions(), pb.SamplingOptions(temperature=1.0, seed=7)):
                    fields: dict[str, Any] = {"text": question, "sampling": sampling}
                    fields["stop"] = pb.StopOptions(max_tokens=30)
                    arm, plain, _ = await generate(stub, **fields, drafting=pb.DraftOptions(enabled=False))
                    assert not arm
                    for index, of_arm in units.items():
                        arm, tokens, end = await generate(stub, **fields, request_id=of_arm.pop())
                        assert arm == ARMS[index]["id"]
                        assert tokens == plain, arm
                        seen.setdefault(arm, []).append(end)
            accepted = {arm: sum(end.drafting.accepted_tokens for end in ends) for arm, ends in seen.items()}
            assert accepted["trie"] > 0 < accepted["hybrid"]
            assert accepted["off"] == 0
            drafted = sum(one.drafting.draft_tokens > 0 for arm in seen.values() for one in arm)
            await until(lambda: sum(count.audited for count in server.audits.counts.values()) >= drafted)
            report = await admin.GetExperimentReport(xp.GetExperimentReportRequest(name="experiments/x"))
            assert [row.requests for row in report.arms] == [len(seen[arm["id"]]) for arm in ARMS]  # type: ignore[index]
            assert sum(row.audited for row in report.arms) == drafted
            assert sum(row.differing for row in report.arms) == 0
            for row in report.arms:
                assert (row.metrics["tokens_per_step"] > 1.02) == (row.arm != "off"), row
                assert 0 < row.metrics["decode_seconds_per_token"] < 1
    finally:
        await server.stop()
