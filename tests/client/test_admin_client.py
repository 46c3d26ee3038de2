"""The operators' client of tenants and experiments: blocking and asyncio alike."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from draftwood.admin.v1 import experiments_pb2 as xp
from draftwood.admin.v1 import tenants_pb2 as pb
from draftwood_client import (
    AbortedError,
    AdminClient,
    AlreadyExistsError,
    ArgumentTypeError,
    ArgumentValueError,
    AsyncAdminClient,
    Experiment,
    ExperimentArm,
    FailedPreconditionError,
    InvalidRequestError,
    NotFoundError,
    StatusError,
    Tenant,
)
from tests.client.conftest import OnThreads
from tests.client.fake_admin import FakeAdmin


@pytest.fixture(params=["sync", "async"])
async def client(request: pytest.FixtureRequest, admin: FakeAdmin) -> AsyncIterator[Any]:
    """Either client, with the interface of asyncio."""
    made: Any = OnThreads(AdminClient(admin.target, api_key="k"))
    async with made if request.param == "sync" else AsyncAdminClient(admin.target, api_key="k") as entered:
        yield entered


ARMS = [ExperimentArm(id="a"), ExperimentArm(id="b")]


async def test_the_life_of_a_tenant(admin: FakeAdmin, client: Any) -> None:
    made = await client.tenants.create("acme", Tenant(weight=2, description="d"))
    assert (made.name, made.etag, made.weight, made.origin) == ("tenants/acme", "1", 2, pb.RESOURCE_ORIGIN_API)
    made.weight, made.description = 3, "not in the mask"
    changed = await client.tenants.update(made, ["weight"])
    assert (changed.weight, changed.description, changed.etag) == (3, "d", "2")
    assert (await client.tenants.update(Tenant(name="tenants/acme", weight=4), validate_only=True)).weight == 4
    assert await client.tenants.get("acme") == changed
    await client.tenants.delete("acme", etag=changed.etag)
    await client.tenants.delete("acme", allow_missing=True)
    assert admin.metadata[0]["authorization"] == "Bearer k"
    assert [(method, mask) for method, _, mask in admin.tenants.writes] == [
        ("create", ["description", "weight"]),
        ("update", ["weight"]),
        ("delete", []),
    ]


async def test_headers_and_deadlines_of_single_calls(admin: FakeAdmin, client: Any) -> None:
    admin.tenants.held["tenants/a"] = pb.Tenant(name="tenants/a")
    await client.tenants.get("a", metadata={"X-Ticket": "7"}, timeout=5.0)
    assert [tenant.name async for tenant in client.tenants.list(metadata={"x-ticket": "8"})] == ["tenants/a"]
    await client.experiments.create("e", Experiment(arms=ARMS), metadata={"x-ticket": "9"})
    with pytest.raises(ArgumentTypeError, match="timeuot: there is no such option"):
        await client.tenants.get("a", timeuot=1)
    with pytest.raises(ArgumentValueError, match="timeout"):
        await client.tenants.get("a", timeout=-1)
    assert [headers.get("x-ticket") for headers in admin.metadata] == ["7", "8", "9"]
    assert {headers["authorization"] for headers in admin.metadata} == {"Bearer k"}


async def test_lists_read_all_pages(admin: FakeAdmin, client: Any) -> None:
    admin.tenants.page = admin.experiments.page = 2
    for name in "abcde":
        admin.tenants.held[f"tenants/{name}"] = pb.Tenant(name=f"tenants/{name}")
        admin.experiments.held[f"experiments/{name}"] = xp.Experiment(name=f"experiments/{name}")
    assert [tenant.name async for tenant in client.tenants.list()] == [*admin.tenants.held]
    assert [experiment.name async for experiment in client.experiments.list(page_size=1)] == [*admin.experiments.held]


async def test_the_life_of_an_experiment(admin: FakeAdmin, client: Any) -> None:
    admin.experiments.reports["experiments/x"] = xp.ExperimentReport(servers=3)
    experiments = client.experiments
    made = await experiments.create("x", Experiment(arms=ARMS, tenants=("acme",)))
    assert made.state == xp.EXPERIMENT_STATE_DRAFT
    assert (await experiments.start("x", validate_only=True)).state == xp.EXPERIMENT_STATE_RUNNING
    assert (await experiments.get("x")).state == xp.EXPERIMENT_STATE_DRAFT
    running = await experiments.start("x", etag=made.etag)
    running.coverage = 0.5
    assert (await experiments.update(running, ["coverage"])).coverage == 0.5
    assert (await experiments.report("x")).servers == 3
    assert (await experiments.stop("x")).state == xp.EXPERIMENT_STATE_STOPPED
    assert (await experiments.conclude("x", "b", keep_tenants=True)).winner == "b"
    await experiments.delete("x")
    assert admin.experiments.held == {}


async def test_errors_have_types_and_name_the_resource(admin: FakeAdmin, client: Any) -> None:
    of_file = pb.Tenant(name="tenants/f", origin=pb.RESOURCE_ORIGIN_FILE, etag="1")
    admin.tenants.held = {"tenants/f": of_file, "tenants/a": pb.Tenant(name="tenants/a", etag="9")}

    async def failure(call: Any) -> StatusError:
        with pytest.raises(StatusError) as caught:
            await call
        return caught.value

    missing = await failure(client.tenants.get("none"))
    assert (type(missing), missing.resource, missing.reason) == (NotFoundError, "tenants/none", "NOT_FOUND")
    assert missing.request_id == "r-1"
    exists = await failure(client.tenants.create("a", Tenant()))
    assert (type(exists), exists.resource) == (AlreadyExistsError, "tenants/a")
    aborted = await failure(client.tenants.update(Tenant(name="tenants/a", etag="8", weight=1)))
    assert (type(aborted), aborted.reason) == (AbortedError, "ETAG_MISMATCH")
    refused = await failure(client.tenants.delete("f"))
    assert isinstance(refused, FailedPreconditionError)
    [violation] = refused.violations
    assert violation.field == "tenants/f"
    assert "tenants file" in violation.description
    wrong = await failure(client.tenants.create("n", Tenant(weight=500)))
    assert isinstance(wrong, InvalidRequestError)
    assert wrong.violations[0].field == "tenant.weight"
