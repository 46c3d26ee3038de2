"""The operators' client of tenants and experiments: blocking and asyncio alike."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args, get_type_hints

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from draftwood.admin.v1 import experiments_pb2 as xp
from draftwood.admin.v1 import tenants_pb2 as pb
from draftwood_client import (
    AbortedError,
    AdminClient,
    AlreadyExistsError,
    ArgumentTypeError,
    ArgumentValueError,
    AsyncAdminClient,
    ClientClosedError,
    Experiment,
    ExperimentArm,
    ExperimentReport,
    FailedPreconditionError,
    InvalidRequestError,
    NotFoundError,
    StatusError,
    Tenant,
)
from draftwood_client.protocol.convert import from_message, to_message
from tests.client.conftest import OnThreads
from tests.client.fake_admin import FakeAdmin


@pytest.fixture(params=["sync", "async"])
async def client(request: pytest.FixtureRequest, admin: FakeAdmin) -> AsyncIterator[Any]:
    """Either client, with the interface of asyncio."""
    made: Any = OnThreads(AdminClient(admin.target, api_key="k"))
    async with made if request.param == "sync" else AsyncAdminClient(admin.target, api_key="k") as entered:
        yield entered


ARMS = ExperimentArm("a"), ExperimentArm("b")


async def test_the_life_of_a_tenant(admin: FakeAdmin, client: Any) -> None:
    made = await client.tenants.create("acme", Tenant(weight=2, description="d"))
    assert (made.name, made.etag, made.weight, made.origin) == ("tenants/acme", "1", 2, "api")
    changed = await client.tenants.update(replace(made, weight=3, description="not in the mask"), ["weight"])
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
    assert [one.name async for one in client.tenants.list(metadata={"x-ticket": "8"})] == ["tenants/a"]
    await client.experiments.create("e", Experiment(arms=ARMS), metadata={"x-ticket": "9"})
    with pytest.raises(ArgumentTypeError, match="timeuot: there is no such option"):
        await client.tenants.get("a", timeuot=1)
    with pytest.raises(ArgumentValueError, match="timeout"):
        await client.tenants.get("a", timeout=-1)
    assert [one.get("x-ticket") for one in admin.metadata] == ["7", "8", "9"]
    assert {one["authorization"] for one in admin.metadata} == {"Bearer k"}


async def test_lists_read_all_pages(admin: FakeAdmin, client: Any) -> None:
    admin.page = 2
    for name in "abcde":
        admin.tenants.held[f"tenants/{name}"] = pb.Tenant(name=f"tenants/{name}")
        admin.experiments.held[f"experiments/{name}"] = xp.Experiment(name=f"experiments/{name}")

    assert [one.name async for one in client.tenants.list()] == [*admin.tenants.held]
    assert [one.name async for one in client.experiments.list(page_size=1)] == [*admin.experiments.held]


async def test_the_life_of_an_experiment(admin: FakeAdmin, client: Any) -> None:
    admin.reports["experiments/x"] = xp.ExperimentReport(servers=3)
    experiments = client.experiments
    made = await experiments.create("x", Experiment(arms=ARMS, tenants=("acme",)))
    assert made.state == "draft"
    assert (await experiments.start("x", validate_only=True)).state == "running"
    assert (await experiments.get("x")).state == "draft"
    running = await experiments.start("x", etag=made.etag)
    assert (await experiments.update(replace(running, coverage=0.5), ["coverage"])).coverage == 0.5
    assert (await experiments.report("x")).servers == 3
    assert (await experiments.stop("x")).state == "stopped"
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


async def test_a_closed_client(client: Any) -> None:
    await client.close()
    await client.close()
    with pytest.raises(ClientClosedError, match="is closed"):
        await client.experiments.get("x")


@pytest.mark.parametrize("name", ["tenants", "experiments"])
def test_both_clients_have_the_same_methods(name: str) -> None:
    blocking, other = getattr(AdminClient("x:1"), name), getattr(AsyncAdminClient("x:1"), name)

    def methods(of: Any) -> dict[str, Any]:
        found = inspect.getmembers(type(of), inspect.isfunction)
        return {key: [*inspect.signature(value).parameters.values()] for key, value in found if key[0] != "_"}

    assert methods(blocking) == methods(other)


SAMPLES: dict[int, Any] = {
    FieldDescriptor.CPPTYPE_INT32: 3,
    FieldDescriptor.CPPTYPE_INT64: 2**40,
    FieldDescriptor.CPPTYPE_UINT64: 2**63,
    FieldDescriptor.CPPTYPE_DOUBLE: 0.1,
    FieldDescriptor.CPPTYPE_FLOAT: 0.1,
    FieldDescriptor.CPPTYPE_BOOL: True,
    FieldDescriptor.CPPTYPE_STRING: "text",
}


def filled(kind: type[Any], message: Message) -> Message:
    """The message with a value in each field that the dataclass has."""
    for name, hint in get_type_hints(kind).items():
        field, part = message.DESCRIPTOR.fields_by_name[name], getattr(message, name)
        inner = next((one for one in (hint, *get_args(hint)) if is_dataclass(one)), None)
        if inner is not None:
            filled(inner, part.add() if field.is_repeated else part)  # type: ignore[arg-type]
        elif field.message_type is None:
            value = 1 if field.enum_type is not None else SAMPLES[field.cpp_type]
            part.append(value) if field.is_repeated else setattr(message, name, value)
        elif field.message_type.name == "Struct":
            part.update({"branch_length": 8, "list": [1.5, None, {"deep": True}]})
        elif field.message_type.GetOptions().map_entry:
            part["key"] = 0.25
        else:
            part.FromNanoseconds(1_500_000_000)  # a duration, or a time
    return message


@pytest.mark.parametrize(
    ("kind", "message"), [(Tenant, pb.Tenant), (Experiment, xp.Experiment), (ExperimentReport, xp.ExperimentReport)]
)
def test_plain_values_lose_nothing(kind: type[Any], message: type[Message]) -> None:
    full = filled(kind, message())
    missing = {field.name for field in full.DESCRIPTOR.fields} - {field.name for field in fields(kind)}
    assert not missing
    for one in (full, message()):
        value = from_message(kind, one)
        assert from_message(kind, to_message(value, message)) == value
    assert to_message(from_message(kind, full), message) == full


def test_a_value_that_cannot_be_sent(admin: FakeAdmin) -> None:
    wrong: Any = "much"
    with AdminClient(admin.target) as client:
        with pytest.raises(ArgumentValueError, match=r"weight: 'much' is not allowed: "):
            client.tenants.create("a", Tenant(weight=wrong))
        with pytest.raises(ArgumentValueError, match=r"unit: 'day' is not allowed: it must be one of 'request', 'se"):
            client.experiments.create("a", Experiment(unit="day"))
    assert not admin.metadata
