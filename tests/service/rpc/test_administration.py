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
from draftwood_model_runner.errors import InvalidInputError
from draftwood_model_runner.request import MemoryOptions
from draftwood_tenants.config import DeltaShaping, TenantConfig
from draftwood_tenants.file import read_file
from draftwood_tenants.reading import ServerLimits
from tests.memory.servers import Valkey
from tests.service.fakes import Served, serving, until
from tests.service.rpc.test_endings import reason

CODE = grpc.StatusCode
ARMS = [{"id": "control"}, {"id": "trie", "drafting": {"strategy": "trie", "maxNodes": 7}}]


def tenants(served: Served) -> Any:
    return tenants_pb2_grpc.TenantServiceStub(served.channel)


def experiments(served: Served) -> Any:
    return experiments_pb2_grpc.ExperimentServiceStub(served.channel)


def tenant(**fields: Any) -> pb.Tenant:
    return ParseDict(fields, pb.Tenant())


def experiment(**fields: Any) -> xp.Experiment:
    return ParseDict({"arms": ARMS, **fields}, xp.Experiment())


async def refused(call: Any, code: grpc.StatusCode, text: str = "") -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    assert error.value.code() is code, error.value
    assert text in str(error.value.details())


def config_of(served: Served, name: str) -> TenantConfig:
    return served.server.tenants.catalog.config_of(name)


async def test_the_life_of_a_tenant(served: Served) -> None:
    stub = tenants(served)
    given = tenant(weight=2, drafting={"strategy": "trie", "maxNodes": 9}, quotas={"concurrency": 3})
    dry = await stub.CreateTenant(pb.CreateTenantRequest(tenant_id="a", tenant=given, validate_only=True))
    assert (dry.name, dry.weight) == ("tenants/a", 2)
    assert config_of(served, "a") == TenantConfig()
    made = await stub.CreateTenant(pb.CreateTenantRequest(tenant_id="a", tenant=given))
    assert made == await stub.GetTenant(pb.GetTenantRequest(name="tenants/a"))
    assert made.origin == pb.RESOURCE_ORIGIN_API
    assert config_of(served, "a").drafting.max_nodes == 9
    await refused(stub.CreateTenant(pb.CreateTenantRequest(tenant_id="a")), CODE.ALREADY_EXISTS)
    change = tenant(name="tenants/a", drafting={"maxNodes": 4}, etag=made.etag)
    mask = FieldMask(paths=["drafting.max_nodes", "weight"])
    changed = await stub.UpdateTenant(pb.UpdateTenantRequest(tenant=change, update_mask=mask))
    assert (changed.drafting.strategy, changed.drafting.max_nodes) == ("trie", 4)
    assert not changed.HasField("weight")
    assert changed.quotas.concurrency == 3
    assert changed.create_time == made.create_time
    await refused(stub.UpdateTenant(pb.UpdateTenantRequest(tenant=change)), CODE.ABORTED)
    some = await stub.UpdateTenant(pb.UpdateTenantRequest(tenant=tenant(name="tenants/a", weight=5)))
    assert (some.weight, some.drafting.max_nodes) == (5, 4)
    whole = pb.UpdateTenantRequest(tenant=tenant(name="tenants/a", weight=3), update_mask=FieldMask(paths=["*"]))
    replaced = await stub.UpdateTenant(whole)
    assert (replaced.weight, replaced.HasField("drafting"), replaced.HasField("quotas")) == (3, False, False)
    await refused(stub.DeleteTenant(pb.DeleteTenantRequest(name="tenants/a", etag=made.etag)), CODE.ABORTED)
    await stub.DeleteTenant(pb.DeleteTenantRequest(name="tenants/a", etag=replaced.etag))
    await refused(stub.GetTenant(pb.GetTenantRequest(name="tenants/a")), CODE.NOT_FOUND)
    await refused(stub.DeleteTenant(pb.DeleteTenantRequest(name="tenants/a")), CODE.NOT_FOUND)
    await stub.DeleteTenant(pb.DeleteTenantRequest(name="tenants/a", allow_missing=True))
    await refused(stub.UpdateTenant(pb.UpdateTenantRequest(tenant=tenant(name="tenants/a"))), CODE.NOT_FOUND)
    of_another = pb.UpdateTenantRequest(tenant=tenant(name="tenants/a", etag=made.etag), allow_missing=True)
    await refused(stub.UpdateTenant(of_another), CODE.ABORTED)
    await stub.UpdateTenant(pb.UpdateTenantRequest(tenant=tenant(name="tenants/a"), allow_missing=True))


async def test_requests_follow_a_tenants_quotas_and_streaming() -> None:
    async with serving(requests_per_minute=100) as served:
        given = tenant(quotas={"requestsPerMinute": 1}, streaming={"paddingBytes": 512})
        await tenants(served).CreateTenant(pb.CreateTenantRequest(tenant_id="a", tenant=given))
        request = generation_pb2.GenerateRequest(tenant="a", text="x", stop={"max_tokens": 4})
        sizes = {message.ByteSize() % 512 async for message in served.stub.GenerateStream(request)}
        assert sizes == {0}
        with pytest.raises(grpc.aio.AioRpcError, match="requests_per_minute") as caught:
            [message async for message in served.stub.GenerateStream(request)]
        assert caught.value.code() is CODE.RESOURCE_EXHAUSTED
        others = generation_pb2.GenerateRequest(tenant="b", text="x", stop={"max_tokens": 4})
        for _ in range(3):
            assert any([message.ByteSize() % 512 async for message in served.stub.GenerateStream(others)])


async def test_a_tenants_weight_replaces_that_of_the_settings() -> None:
    async with serving(tenant_weights={"a": 3.0}) as served:
        assert (served.server.bridge.weight_of("a"), served.server.bridge.weight_of("b")) == (3.0, 1.0)
        for name in ("a", "b"):
            await tenants(served).CreateTenant(pb.CreateTenantRequest(tenant_id=name, tenant=tenant(weight=5)))
        assert (served.server.bridge.weight_of("a"), served.server.bridge.weight_of("b")) == (5.0, 5.0)


async def test_errors_name_the_field() -> None:
    bad: dict[str, dict[str, Any]] = {
        "tenant.name": {"name": "tenants/b"},
        "tenant.weight": {"weight": 1000},
        "tenant.drafting.options.x": {"drafting": {"strategy": "trie", "options": {"x": 1}}},
        "tenant.sampling.seed": {"sampling": {"seed": 1}},
        "tenant.sampling.top_p": {"sampling": {"topP": 2}},
        "tenant.quotas.concurrency": {"quotas": {"concurrency": 0}},
        "tenant.streaming.padding_bytes": {"streaming": {"paddingBytes": 70000}},
    }
    async with serving() as served:
        for field, fields in bad.items():
            request = pb.CreateTenantRequest(tenant_id="a", tenant=tenant(**fields))
            await refused(tenants(served).CreateTenant(request), CODE.INVALID_ARGUMENT, field)
        for path in ("nothing", "drafting.nothing", "etag", "drafting.options.x", "weight.x"):
            mask = FieldMask(paths=[path])
            change = pb.UpdateTenantRequest(tenant=tenant(name="tenants/a"), update_mask=mask, allow_missing=True)
            await refused(tenants(served).UpdateTenant(change), CODE.INVALID_ARGUMENT, "update_mask")


async def test_pages(served: Served) -> None:
    names = sorted(f"t{number}~" for number in range(7))
    for name in reversed(names):
        await tenants(served).CreateTenant(pb.CreateTenantRequest(tenant_id=name))
    seen, token = [], ""
    while True:
        page = await tenants(served).ListTenants(pb.ListTenantsRequest(page_size=3, page_token=token))
        seen += [one.name.removeprefix("tenants/") for one in page.tenants]
        token = page.next_page_token
        if not token:
            break
    assert seen == names
    for wrong, field in (({"page_size": -1}, "page_size"), ({"page_token": "x"}, "page_token")):
        await refused(tenants(served).ListTenants(pb.ListTenantsRequest(**wrong)), CODE.INVALID_ARGUMENT, field)


async def test_requests_use_the_tenants_configuration(served: Served) -> None:
    fields = {"allowDraftOverride": False, "drafting": {"strategy": "jacobi"}, "sampling": {"temperature": 5}}
    await tenants(served).CreateTenant(pb.CreateTenantRequest(tenant_id="a", tenant=tenant(**fields)))
    request: dict[str, Any] = {"text": "x", "tenant": "a", "stop": {"max_tokens": 2}}
    many = generation_pb2.GenerateRequest(**request, sampling={"n": 2})  # needs a temperature above 0
    events = [event async for event in served.stub.GenerateStream(many)]
    assert events[-1].WhichOneof("event") == "finished"
    for name, value in (("strategy", "trie"), ("max_nodes", 3), ("enabled", False)):
        override = generation_pb2.GenerateRequest(**request, drafting={name: value})
        with pytest.raises(grpc.aio.AioRpcError) as error:
            [_ async for _ in served.stub.GenerateStream(override)]
        assert reason(error.value) == "PERMISSION_DENIED"
        assert f"drafting.{name}" in str(error.value.details())


async def test_two_servers_share_tenants_and_one_of_two_updates_wins(server: Valkey) -> None:
    async with serving(store=server.url) as one, serving(store=server.url) as two:
        made = await tenants(one).CreateTenant(pb.CreateTenantRequest(tenant_id="a", tenant=tenant(weight=2)))
        await until(lambda: config_of(two, "a").weight == 2)
        calls = [
            tenants(served).UpdateTenant(
                pb.UpdateTenantRequest(tenant=tenant(name="tenants/a", weight=number + 3, etag=made.etag))
            )
            for number, served in enumerate((one, two) * 4)
        ]
        results = await asyncio.gather(*calls, return_exceptions=True)
        codes = [result.code() for result in results if isinstance(result, grpc.aio.AioRpcError)]
        assert codes == [CODE.ABORTED] * 7


async def test_what_the_file_names_is_the_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text("tenants:\n- {name: tenants/a, weight: 2}\n")
    async with serving(tenants_file=path) as served:
        stub = tenants(served)
        found = await stub.GetTenant(pb.GetTenantRequest(name="tenants/a"))
        assert (found.origin, config_of(served, "a").weight) == (pb.RESOURCE_ORIGIN_FILE, 2)
        change = pb.UpdateTenantRequest(tenant=tenant(name="tenants/a", weight=3))
        await refused(stub.UpdateTenant(change), CODE.FAILED_PRECONDITION, "tenants file")
        await refused(stub.DeleteTenant(pb.DeleteTenantRequest(name="tenants/a")), CODE.FAILED_PRECONDITION)
        await stub.CreateTenant(pb.CreateTenantRequest(tenant_id="b", tenant=tenant(weight=4)))
        path.write_text("tenants:\n- {name: tenants/b, weight: 7}\n- {name: tenants/a, wait: 1}\n")
        await until(lambda: "the version before stays in use" in caplog.text)
        assert (config_of(served, "a").weight, config_of(served, "b").weight) == (2, 4)  # a broken file changes nothing
        path.write_text("tenants:\n- {name: tenants/b, weight: 7}\n")
        await until(lambda: config_of(served, "b").weight == 7)
        assert config_of(served, "a") == TenantConfig()
    path.write_text("tenants:\n- {name: tenants/b}\n- {name: tenants/c, drafting: {options: {x: 1}}}\n")
    with pytest.raises(InvalidInputError, match=rf"^tenants_file {path}: tenants\[1\]\.drafting\.options\.x: "):
        read_file(path, ServerLimits("hybrid", 48, 1_000_000, 2**24, DeltaShaping()))


async def test_the_life_of_an_experiment(served: Served) -> None:
    stub = experiments(served)
    for name, scope in (("one", ["a", "b"]), ("two", ["b", "c"])):
        request = xp.CreateExperimentRequest(experiment_id=name, experiment=experiment(tenants=scope, coverage=0.5))
        made = await stub.CreateExperiment(request)
        assert (made.state, len(made.salt)) == (xp.EXPERIMENT_STATE_DRAFT, 32)
        draft = xp.Experiment(name=made.name, alpha=0.04)
        assert (await stub.UpdateExperiment(xp.UpdateExperimentRequest(experiment=draft))).alpha == 0.04
    bad: dict[str, Any] = {"tenants": [str(number) for number in range(10_001)], "unit": 9}
    for field, value in bad.items():
        request = xp.CreateExperimentRequest(experiment_id="x", experiment=xp.Experiment(**{field: value}))
        await refused(stub.CreateExperiment(request), CODE.INVALID_ARGUMENT, f"experiment.{field}")
    started = await stub.StartExperiment(xp.StartExperimentRequest(name="experiments/one"))
    assert started.state == xp.EXPERIMENT_STATE_RUNNING
    refuse = CODE.FAILED_PRECONDITION
    await refused(stub.StartExperiment(xp.StartExperimentRequest(name="experiments/two")), refuse, "b is in one")
    changes: tuple[tuple[dict[str, Any], bool], ...] = (
        ({"coverage": 0.7}, True),
        ({"coverage": 0.6}, False),
        ({"alpha": 0.1}, False),
    )
    for fields, fine in changes:
        change = xp.Experiment(name="experiments/one", **fields)
        updating = stub.UpdateExperiment(xp.UpdateExperimentRequest(experiment=change))
        await (updating if fine else refused(updating, refuse))
    await refused(stub.DeleteExperiment(xp.DeleteExperimentRequest(name="experiments/one")), refuse, "stop it first")
    await stub.StopExperiment(xp.StopExperimentRequest(name="experiments/one"))
    described = xp.Experiment(name="experiments/one", description="d")
    changed = xp.Experiment(name="experiments/one", alpha=0.1)
    await stub.UpdateExperiment(xp.UpdateExperimentRequest(experiment=described))
    changing = stub.UpdateExperiment(xp.UpdateExperimentRequest(experiment=changed))
    await refused(changing, refuse, "only the description")
    await refused(stub.StartExperiment(xp.StartExperimentRequest(name="experiments/one")), refuse)
    await stub.StartExperiment(xp.StartExperimentRequest(name="experiments/two"))
    await tenants(served).CreateTenant(pb.CreateTenantRequest(tenant_id="a", tenant=tenant(weight=2)))
    wrong = xp.ConcludeExperimentRequest(name="experiments/one", winner="x")
    await refused(stub.ConcludeExperiment(wrong), CODE.INVALID_ARGUMENT, "winner")
    conclude = xp.ConcludeExperimentRequest(name="experiments/one", winner="trie")
    concluded = await stub.ConcludeExperiment(conclude)
    assert (concluded.state, concluded.winner) == (xp.EXPERIMENT_STATE_CONCLUDED, "trie")
    found = config_of(served, "a")
    assert (found.weight, found.drafting.strategy, found.drafting.max_nodes) == (2, "trie", 7)
    assert config_of(served, "b").drafting.strategy == "trie"
    assert config_of(served, "c") == TenantConfig()
    await stub.DeleteExperiment(xp.DeleteExperimentRequest(name="experiments/one", validate_only=True))
    assert len((await stub.ListExperiments(xp.ListExperimentsRequest())).experiments) == 2
    await stub.DeleteExperiment(xp.DeleteExperimentRequest(name="experiments/one"))
    assert len((await stub.ListExperiments(xp.ListExperimentsRequest())).experiments) == 1
    report = await stub.GetExperimentReport(xp.GetExperimentReportRequest(name="experiments/two"))
    assert "Too early" in report.conclusions[0].text


async def test_conclude_writes_no_tenant_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text("tenants: [{name: tenants/a}]\n")
    async with serving(tenants_file=path) as served:
        stub = experiments(served)
        for name, scope in (("some", ["a"]), ("all", [])):
            request = xp.CreateExperimentRequest(experiment_id=name, experiment=experiment(tenants=scope))
            await stub.CreateExperiment(request)
            await stub.StartExperiment(xp.StartExperimentRequest(name=f"experiments/{name}"))
            conclude = xp.ConcludeExperimentRequest(name=f"experiments/{name}", winner="trie")
            named = "tenants file defines a" if scope else "--strategy"
            await refused(stub.ConcludeExperiment(conclude), CODE.FAILED_PRECONDITION, named)
            conclude.keep_tenants = True
            concluded = await stub.ConcludeExperiment(conclude)
            assert concluded.state == xp.EXPERIMENT_STATE_CONCLUDED
        found = await tenants(served).GetTenant(pb.GetTenantRequest(name="tenants/a"))
        assert not found.HasField("drafting")


async def test_tenants_in_the_embedded_store_survive_a_restart(tmp_path: Path) -> None:
    for _ in range(2):
        async with serving(store="embedded", store_folder=tmp_path / "s") as served:
            request = pb.UpdateTenantRequest(tenant=tenant(name="tenants/a"), allow_missing=True)
            made = await tenants(served).UpdateTenant(request)
    assert made.update_time.ToNanoseconds() > made.create_time.ToNanoseconds()


async def test_requests_carry_options_and_learning_of_their_tenant(served: Served) -> None:
    stub = tenants(served)
    drafting = {"strategy": "trie", "options": {"branch_length": 3}, "maxNodes": 5}
    learning = {"scope": "LEARNING_SCOPE_PROMPTS_AND_OUTPUTS", "maxTokens": 2048, "idleTtl": "60s"}
    made = tenant(drafting=drafting, learning=learning)
    await stub.CreateTenant(pb.CreateTenantRequest(tenant_id="a", tenant=made))
    silent = tenant(learning={"scope": "LEARNING_SCOPE_NOTHING"})
    await stub.CreateTenant(pb.CreateTenantRequest(tenant_id="b", tenant=silent))
    asked = {
        "usual": generation_pb2.GenerateRequest(tenant="a"),
        "another strategy": generation_pb2.GenerateRequest(tenant="a", drafting={"strategy": "recycling"}),
        "nothing learned": generation_pb2.GenerateRequest(tenant="b"),
        "unknown tenant": generation_pb2.GenerateRequest(tenant="c"),
    }
    found = {}
    for name, message in asked.items():
        message.MergeFrom(generation_pb2.GenerateRequest(text="x", stop={"max_tokens": 2}))
        [_ async for _ in served.stub.GenerateStream(message)]
        found[name] = served.engine.added[-1].request
    usual, other = found["usual"], found["another strategy"]
    assert usual.drafting.options == (("branch_length", 3), ("learn", "both"))
    assert usual.memory == MemoryOptions(with_prompts=True, max_tokens=2048, idle_ttl=60.0)
    assert (other.drafting.strategy, other.drafting.options) == ("recycling", ())  # the options are another strategy's
    assert [request.learns for request in found.values()] == [True, True, False, True]
    assert (found["unknown tenant"].drafting.options, found["unknown tenant"].memory) == ((), MemoryOptions())
