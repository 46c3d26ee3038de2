"""The rules of Google's API guidelines, each broken once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto

from tools.protocol_rules import built, violations

Break = Callable[[DescriptorProto], None]


@pytest.fixture(scope="module")
def files() -> list[FileDescriptorProto]:
    return built()


def message(files: list[FileDescriptorProto], name: str) -> DescriptorProto:
    return next(one for file in files for one in file.message_type if one.name == name)


def field(message: DescriptorProto, name: str) -> FieldDescriptorProto:
    return next(one for one in message.field if one.name == name)


def test_the_protocol_breaks_none(files: list[FileDescriptorProto]) -> None:
    assert violations(files) == []


def without(name: str) -> Break:
    return lambda message: message.field.remove(field(message, name))


def renamed(name: str, new: str) -> Break:
    return lambda message: setattr(field(message, name), "name", new)


def plain(name: str) -> Break:
    return lambda message: field(message, name).ClearField("options")


def single(message: DescriptorProto) -> None:
    message.field[0].label = FieldDescriptorProto.LABEL_OPTIONAL


def as_float(message: DescriptorProto) -> None:
    message.field[0].type = FieldDescriptorProto.TYPE_FLOAT


def of_another_domain(message: DescriptorProto) -> None:
    options = message.options.SerializeToString().replace(b"draftwood.dev/", b"draftwood.org/")
    message.options.ParseFromString(options)


BROKEN: list[tuple[str, Break, str]] = [
    ("SamplingOptions", as_float, "temperature: must be double"),
    ("PurgeMemoryResponse", renamed("final_time", "final"), "AIP-142"),
    ("Timings", renamed("queue", "queue_time"), "AIP-142"),
    ("Timings", renamed("queue", "queue_seconds"), "AIP-142: a Duration has no unit"),
    ("Tenant", of_another_domain, "AIP-123: the type must be draftwood.dev/Tenant"),
    ("Tenant", plain("name"), "AIP-122: the first field must be the string name"),
    ("Experiment", plain("create_time"), "Experiment.create_time: AIP-148"),
    (
        "CreateTenantRequest",
        without("tenant_id"),
        "CreateTenant: AIP-133: the request must have the required tenant_id",
    ),
    ("CreateTenantRequest", plain("tenant"), "AIP-133, 134"),
    ("UpdateExperimentRequest", without("update_mask"), "UpdateExperiment: AIP-134"),
    ("GetTenantRequest", plain("name"), "GetTenant: AIP-131, 135, 136"),
    ("GetTenantRequest", without("name"), "GetTenant: AIP-131: the request must have the name"),
    ("StopExperimentRequest", plain("name"), "StopExperiment: AIP-131, 135, 136"),
    ("ListTenantsRequest", without("page_size"), "ListTenants: AIP-158: the request"),
    ("GetMemoryStatisticsResponse", without("next_page_token"), "GetMemoryStatistics: AIP-158: the response"),
    ("ListOrphanedMemoriesResponse", single, "ListOrphanedMemories: AIP-158: the first field"),
]


@pytest.mark.parametrize(("name", "spoil", "found"), BROKEN)
def test_each_rule(files: list[FileDescriptorProto], name: str, spoil: Break, found: str) -> None:
    broken = [FileDescriptorProto.FromString(file.SerializeToString()) for file in files]
    spoil(message(broken, name))
    assert any(found in line for line in violations(broken)), violations(broken)
