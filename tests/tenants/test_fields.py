"""A tenants file that is wrong says so in its own names, not in protobuf's."""

from __future__ import annotations

import pytest

from draftwood.admin.v1.tenants_pb2 import Tenant
from draftwood_errors import InvalidInputError
from draftwood_tenants.file import read_content
from draftwood_tenants.reading import ServerLimits

LIMITS = ServerLimits("hybrid", 64, 1_000_000, 0)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("wieght: 2", "tenants[0].wieght: there is no such field; did you mean weight"),
        ("weight: heavy", "tenants[0].weight heavy: must be a number"),
        ("weight: [2]", "tenants[0].weight [2]: must be a number"),
        ("drafting: trie", "tenants[0].drafting trie: must be a mapping"),
        ("drafting: {stratgy: trie}", "tenants[0].drafting.stratgy: there is no such field; did you mean strategy"),
        ("drafting: {strategy: 5}", "tenants[0].drafting.strategy 5: must be a text"),
        ("quota: {}", "tenants[0].quota: there is no such field"),
    ],
)
def test_the_place_the_value_and_what_is_wanted(entry: str, problem: str) -> None:
    text = f"tenants:\n- name: tenants/acme\n  {entry}\n"
    with pytest.raises(InvalidInputError) as raised:
        read_content(text.encode(), LIMITS)
    assert str(raised.value).startswith(problem)
    assert "draftwood.v1" not in str(raised.value)


def test_what_is_right_is_taken() -> None:
    text = b"tenants:\n- name: tenants/acme\n  weight: 2\n  drafting: {strategy: trie, options: {branch_length: 8}}\n"
    assert Tenant.FromString(read_content(text, LIMITS).tenants["acme"].value).weight == 2
