"""Tenants and experiments over gRPC, through a whole server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.json_format import ParseDict

from draftwood.admin.v1 import experiments_pb2 as xp
from draftwood.admin.v1 import experiments_pb2_grpc, tenants_pb2_grpc
from draftwood.admin.v1 import tenants_pb2 as pb
from draftwood.v1 import generation_pb2
from draftwood_model_runner.request import MemoryOptions
from draftwood_tenants.config import TenantConfig
from tests.memory.servers import Valkey
from tests.service.fakes import Served, refusal, rewrite, serving, until
from tests.service.rpc.test_endings import reason

CODE = grpc.StatusCode
ARMS = [{"id": "control"}, {"id": "trie", "drafting": {"strategy": "trie", "maxNodes": 7}}]


def tenants(served: Served) -> Any:
    return tenants_pb2_grpc.TenantServiceStub(served.channel)


def experiments(served: Served) -> Any:
    return experiments_pb2_grpc.ExperimentServiceStub(served.channel)


def tenant(**fields: Any) -> pb.Tenant:
    return ParseDict(fields, pb.Tenant())


def create(served: Served, tenant_id: str, validate_only: bool = False, **fields: Any) -> Any:
    request = pb.CreateTenantRequest(tenant_id=tenant_id, tenant=tenant(**fields), validate_only=validate_only)
    return tenants(served).CreateTenant(request)


def update(served: Served, *paths: str, name: str = "tenants/a", allow_missing: bool = False, **fields: Any) -> Any:
    """Changes these fields, or those that are set."""
    given, mask = tenant(name=name, **fields), FieldMask(paths=paths)
    request = pb.UpdateTenantRequest(tenant=given, update_mask=mask, allow_missing=allow_missing)
    return tenants(served).UpdateTenant(request)


def get(served: Served, name: str = "tenants/a") -> Any:
    return tenants(served).GetTenant(pb.GetTenantRequest(name=name))


def delete(served: Served, **options: Any) -> Any:
    return tenants(served).DeleteTenant(pb.DeleteTenantRequest(name="tenants/a", **options))


def create_experiment(served: Served, id_: str, **fields: Any) -> Any:
    experiment = ParseDict({"arms": ARMS, **fields}, xp.Experiment())
    return experiments(served).CreateExperiment(xp.CreateExperimentRequest(experiment_id=id_, experiment=experiment))


def update_experiment(served: Served, name: str, **fields: Any) -> Any:
    experiment = xp.Experiment(name=name, **fields)
    return experiments(served).UpdateExperiment(xp.UpdateExperimentRequest(experiment=experiment))


async def refused(call: Any, code: grpc.StatusCode, text: str = "") -> None:
    error = await refusal(call)
    assert error.code() is code, error
    assert text in str(error.details())


def config_of(served: Served, name: str) -> TenantConfig:
    return served.server.tenants.catalog.config_of(name)


async def test_the_life_of_a_tenant(served: Served) -> None:
    given: dict[str, Any] = {"drafting": {"strategy": "trie", "maxNodes": 9}, "quotas": {"concurrency": 3}}
    dry = await create(served, "a", validate_only=True, weight=2, **given)
    assert (dry.name, dry.weight) == ("tenants/a", 2)
    assert config_of(served, "a") == TenantConfig()
    made = await create(served, "a", weight=2, **given)
    assert made == await get(served)
    assert made.origin == pb.RESOURCE_ORIGIN_API
    assert config_of(served, "a").drafting.max_nodes == 9
    await refused(create(served, "a"), CODE.ALREADY_EXISTS)
    changed = await update(served, "drafting.max_nodes", "weight", drafting={"maxNodes": 4}, etag=made.etag)
    assert (changed.drafting.strategy, changed.drafting.max_nodes) == ("trie", 4)
    assert not changed.HasField("weight")
    assert changed.quotas.concurrency == 3
    assert changed.create_time == made.create_time
    await refused(update(served, weight=4, etag=made.etag), CODE.ABORTED)
    some = await update(served, weight=5)
    assert (some.weight, some.drafting.max_nodes) == (5, 4)
    replaced = await update(served, "*", weight=3)
    assert (replaced.weight, replaced.HasField("drafting"), replaced.HasField("quotas")) == (3, False, False)
    await refused(delete(served, etag=made.etag), CODE.ABORTED)
    await delete(served, etag=replaced.etag)
    await refused(get(served), CODE.NOT_FOUND)
    await refused(delete(served), CODE.NOT_FOUND)
    await delete(served, allow_missing=True)
    await refused(update(served), CODE.NOT_FOUND)
    await refused(update(served, allow_missing=True, etag=made.etag), CODE.ABORTED)
    await update(served, allow_missing=True)


async def test_requests_follow_a_tenants_quotas_and_streaming() -> None:
    async with serving(requests_per_minute=100) as served:
        await create(served, "a", quotas={"requestsPerMinute": 1}, streaming={"paddingBytes": 512})
        request = generation_pb2.GenerateRequest(tenant="a", text="x", stop={"max_tokens": 4})
        assert {event.ByteSize() % 512 for event in (await served.answer(request)).events} == {0}
        error = (await served.answer(request)).status
        assert error.code() is CODE.RESOURCE_EXHAUSTED
        assert "requests_per_minute" in str(error.details())
        others = generation_pb2.GenerateRequest(tenant="b", text="x", stop={"max_tokens": 4})
        for _ in range(3):
            assert any(event.ByteSize() % 512 for event in (await served.answer(others)).events)


async def test_a_tenants_weight_replaces_that_of_the_settings() -> None:
    async with serving(tenant_weights={"a": 3.0}) as served:
        weight_of = served.server.bridge.weight_of
        assert (weight_of("a"), weight_of("b")) == (3.0, 1.0)
        for name in ("a", "b"):
            await create(served, name, weight=5)
        assert (weight_of("a"), weight_of("b")) == (5.0, 5.0)


async def test_errors_name_the_field(served: Served) -> None:
    bad: dict[str, dict[str, Any]] = {
        "tenant.name": {"name": "tenants/b"},
        "tenant.weight": {"weight": 1000},
        "tenant.drafting.options.x": {"drafting": {"strategy": "trie", "options": {"x": 1}}},
        "tenant.sampling.top_p": {"sampling": {"topP": 2}},
        "tenant.quotas.concurrency": {"quotas": {"concurrency": 0}},
    }
    for field, fields in bad.items():
        await refused(create(served, "a", **fields), CODE.INVALID_ARGUMENT, field)
    for path in ("nothing", "drafting.nothing", "etag", "drafting.options.x", "weight.x"):
        await refused(update(served, path, allow_missing=True), CODE.INVALID_ARGUMENT, "update_mask")
    for field, value in {"tenants": [str(number) for number in range(10_001)], "unit": 9}.items():
        await refused(create_experiment(served, "x", **{field: value}), CODE.INVALID_ARGUMENT, f"experiment.{field}")


async def test_pages(served: Served) -> None:
    names = sorted(f"t{number}~" for number in range(7))
    for name in reversed(names):
        await create(served, name)
    seen, token, more = [], "", True
    while more:
        page = await tenants(served).ListTenants(pb.ListTenantsRequest(page_size=3, page_token=token))
        seen += [one.name.removeprefix("tenants/") for one in page.tenants]
        token, more = page.next_page_token, bool(page.next_page_token)
    assert seen == names
    for wrong, field in (({"page_size": -1}, "page_size"), ({"page_token": "x"}, "page_token")):
        await refused(tenants(served).ListTenants(pb.ListTenantsRequest(**wrong)), CODE.INVALID_ARGUMENT, field)


async def test_requests_use_the_tenants_configuration(served: Served) -> None:
    fields: dict[str, Any] = {
        "allowDraftOverride": False,
        "drafting": {"strategy": "jacobi"},
        "sampling": {"temperature": 5},
    }
    await create(served, "a", **fields)
    request: dict[str, Any] = {"text": "x", "tenant": "a", "stop": {"max_tokens": 2}}
    many = generation_pb2.GenerateRequest(**request, sampling={"n": 2})  # needs a temperature above 0
    assert (await served.answer(many)).finished
    for name, value in (("strategy", "trie"), ("max_nodes", 3), ("enabled", False)):
        error = (await served.answer(generation_pb2.GenerateRequest(**request, drafting={name: value}))).status
        assert reason(error) == "PERMISSION_DENIED"
        assert f"drafting.{name}" in str(error.details())


async def test_two_servers_share_tenants_and_one_of_two_updates_wins(server: Valkey) -> None:
    async with serving(store=server.url) as one, serving(store=server.url) as two:
        made = await create(one, "a", weight=2)
        await until(lambda: config_of(two, "a").weight == 2)
        updates = [update(served, weight=at + 3, etag=made.etag) for at, served in enumerate((one, two) * 4)]
        results = await asyncio.gather(*updates, return_exceptions=True)
        codes = [result.code() for result in results if isinstance(result, grpc.aio.AioRpcError)]
        assert codes == [CODE.ABORTED] * 7


async def test_what_the_file_names_is_the_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text("tenants:\n- {name: tenants/a, weight: 2}\n")
    async with serving(tenants_file=path) as served:
        assert ((await get(served)).origin, config_of(served, "a").weight) == (pb.RESOURCE_ORIGIN_FILE, 2)
        await refused(update(served, weight=3), CODE.FAILED_PRECONDITION, "tenants file")
        await refused(delete(served), CODE.FAILED_PRECONDITION)
        await create(served, "b", weight=4)
        rewrite(path, "tenants:\n- {name: tenants/b, weight: 7}\n- {name: tenants/a, wait: 1}\n")
        await until(lambda: "the version before stays in use" in caplog.text)
        assert (config_of(served, "a").weight, config_of(served, "b").weight) == (2, 4)  # a broken file changes nothing
        rewrite(path, "tenants:\n- {name: tenants/b, weight: 7}\n")
        await until(lambda: config_of(served, "b").weight == 7)
        assert config_of(served, "a") == TenantConfig()


async def test_the_life_of_an_experiment(served: Served) -> None:
    stub, refuse = experiments(served), CODE.FAILED_PRECONDITION
    one, two = "experiments/one", "experiments/two"
    for name, scope in (("one", ["a", "b"]), ("two", ["b", "c"])):
        made = await create_experiment(served, name, tenants=scope, coverage=0.5)
        assert (made.state, len(made.salt)) == (xp.EXPERIMENT_STATE_DRAFT, 32)
        assert (await update_experiment(served, made.name, alpha=0.04)).alpha == 0.04
    started = await stub.StartExperiment(xp.StartExperimentRequest(name=one))
    assert started.state == xp.EXPERIMENT_STATE_RUNNING
    await refused(stub.StartExperiment(xp.StartExperimentRequest(name=two)), refuse, "b is in one")
    await update_experiment(served, one, coverage=0.7)
    await refused(update_experiment(served, one, coverage=0.6), refuse)
    await refused(update_experiment(served, one, alpha=0.1), refuse)
    await refused(stub.DeleteExperiment(xp.DeleteExperimentRequest(name=one)), refuse, "stop it first")
    await stub.StopExperiment(xp.StopExperimentRequest(name=one))
    await update_experiment(served, one, description="d")
    await refused(update_experiment(served, one, alpha=0.1), refuse, "only the description")
    await refused(stub.StartExperiment(xp.StartExperimentRequest(name=one)), refuse)
    await stub.StartExperiment(xp.StartExperimentRequest(name=two))
    await create(served, "a", weight=2)
    wrong = stub.ConcludeExperiment(xp.ConcludeExperimentRequest(name=one, winner="x"))
    await refused(wrong, CODE.INVALID_ARGUMENT, "winner")
    concluded = await stub.ConcludeExperiment(xp.ConcludeExperimentRequest(name=one, winner="trie"))
    assert (concluded.state, concluded.winner) == (xp.EXPERIMENT_STATE_CONCLUDED, "trie")
    found = config_of(served, "a")
    assert (found.weight, found.drafting.strategy, found.drafting.max_nodes) == (2, "trie", 7)
    assert config_of(served, "b").drafting.strategy == "trie"
    assert config_of(served, "c") == TenantConfig()
    for validate_only, left in ((True, 2), (False, 1)):
        await stub.DeleteExperiment(xp.DeleteExperimentRequest(name=one, validate_only=validate_only))
        assert len((await stub.ListExperiments(xp.ListExperimentsRequest())).experiments) == left
    report = await stub.GetExperimentReport(xp.GetExperimentReportRequest(name=two))
    assert "Too early" in report.conclusions[0].text


async def test_conclude_writes_no_tenant_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text("tenants: [{name: tenants/a}]\n")
    async with serving(tenants_file=path) as served:
        stub = experiments(served)
        for id_, scope in (("some", ["a"]), ("all", [])):
            name = (await create_experiment(served, id_, tenants=scope)).name
            await stub.StartExperiment(xp.StartExperimentRequest(name=name))
            conclude = xp.ConcludeExperimentRequest(name=name, winner="trie")
            named = "tenants file defines a" if scope else "--strategy"
            await refused(stub.ConcludeExperiment(conclude), CODE.FAILED_PRECONDITION, named)
            conclude.keep_tenants = True
            concluded = await stub.ConcludeExperiment(conclude)
            assert concluded.state == xp.EXPERIMENT_STATE_CONCLUDED
        assert not (await get(served)).HasField("drafting")


async def test_tenants_in_the_embedded_store_survive_a_restart(tmp_path: Path) -> None:
    for _ in range(2):
        async with serving(store="embedded", store_folder=tmp_path / "s") as served:
            made = await update(served, allow_missing=True)
    assert made.update_time.ToNanoseconds() > made.create_time.ToNanoseconds()


async def test_requests_carry_options_and_learning_of_their_tenant(served: Served) -> None:
    drafting = {"strategy": "trie", "options": {"branch_length": 3}, "maxNodes": 5}
    learning = {"scope": "LEARNING_SCOPE_PROMPTS_AND_OUTPUTS", "maxTokens": 2048, "idleTtl": "60s"}
    await create(served, "a", drafting=drafting, learning=learning)
    await create(served, "b", learning={"scope": "LEARNING_SCOPE_NOTHING"})
    asked: dict[str, dict[str, Any]] = {
        "usual": {"tenant": "a"},
        "another strategy": {"tenant": "a", "drafting": {"strategy": "recycling"}},
        "nothing learned": {"tenant": "b"},
        "unknown tenant": {"tenant": "c"},
    }
    for fields in asked.values():
        await served.answer(generation_pb2.GenerateRequest(text="x", stop={"max_tokens": 2}, **fields))
    found = dict(zip(asked, (sequence.request for sequence in served.engine.added), strict=True))
    usual, other = found["usual"], found["another strategy"]
    assert usual.drafting.options == (("branch_length", 3), ("learn", "both"))
    assert usual.memory == MemoryOptions(with_prompts=True, max_tokens=2048, idle_ttl=60.0)
    assert (other.drafting.strategy, other.drafting.options) == ("recycling", ())  # the options are another strategy's
    assert [request.learns for request in found.values()] == [True, True, False, True]
    assert (found["unknown tenant"].drafting.options, found["unknown tenant"].memory) == ((), MemoryOptions())
