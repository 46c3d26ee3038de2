"""A tenants file that is wrong says so in its own names, not in protobuf's."""

from __future__ import annotations

import pytest

from draftwood.admin.v1.tenants_pb2 import LEARNING_SCOPE_NOTHING, Tenant
from draftwood_errors import InvalidInputError
from draftwood_tenants.file import read_content
from draftwood_tenants.reading import ServerLimits

X = "weight: 2\nexperiments:\n- {name: experiments/x"
LIMITS = ServerLimits("hybrid", 64, 1_000_000, 0)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("wieght: 2", "tenants[0].wieght: there is no such field; did you mean weight"),
        ("weight: heavy", "tenants[0].weight heavy: must be a number"),
        ("weight: [2]", "tenants[0].weight [2]: must be a number"),
        ("drafting: trie", "tenants[0].drafting trie: must be a mapping"),
        ("drafting: {stratgy: trie}", "tenants[0].drafting.stratgy: there is no such field; did you mean strategy"),
        ("drafting: {strategy: 5.0}", "tenants[0].drafting.strategy 5.0: must be a text"),
        ("quota: {}", "tenants[0].quota: there is no such field"),
        ("zzzz: 1", "tenants[0].zzzz: there is no such field; there are name, description, etag"),
        ("weight: true", "tenants[0].weight True: must be a number"),
        ("allowDraftOverride: 1", "tenants[0].allowDraftOverride 1: must be true or false"),
        ("allowDraftOverride: '1'", "tenants[0].allowDraftOverride 1: must be true or false"),
        ("drafting: {maxNodes: 2.5}", "tenants[0].drafting.maxNodes 2.5: must be a whole number"),
        *(
            (f"learning: {{scope: {scope}}}", f"tenants[0].learning.scope {said}: must be one of LEARNING_SCOPE_NOTHING,")
            for scope, said in (("ALL", "ALL"), ("7", "7"), ("true", "True"), ("[1]", "[1]"))
        ),
        ("sampling: {logitBias: {3: 1}}", "tenants[0].sampling.logit_bias: cannot be a default"),
        (f"{X}, arms: 3}}", "experiments[0].arms 3: must be a list"),
        (f"{X}, arms: [{{id: control}}, {{id: 5}}]}}", "experiments[0].arms[1].id 5: must be a text"),
    ],
)
def test_the_place_the_value_and_what_is_wanted(entry: str, problem: str) -> None:
    text = f"tenants:\n- name: tenants/acme\n  {entry}\n"
    with pytest.raises(InvalidInputError) as raised:
        read_content(text.encode(), LIMITS)
    assert str(raised.value).startswith(problem)
    assert "draftwood.v1" not in str(raised.value)


def test_what_is_right_is_taken() -> None:
    """Also what only JSON, or only YAML, writes in such a form."""
    text = b"""tenants:
- name: tenants/acme
  weight: '2.5'
  drafting: {strategy: trie, options: {branch_length: 8}}
  learning: {scope: LEARNING_SCOPE_NOTHING, max_tokens: '4096', maxAge: 60s}
  quotas: {requestsPerMinute: 5.0}
  streaming: null
  allowDraftOverride: false
- {name: tenants/other, learning: {scope: 1}}
"""
    tenants = read_content(text, LIMITS).tenants
    acme, other = (Tenant.FromString(tenants[name].value) for name in ("acme", "other"))
    assert (acme.weight, acme.learning.max_tokens, acme.quotas.requests_per_minute) == (2.5, 4096, 5)
    assert acme.learning.scope == other.learning.scope == LEARNING_SCOPE_NOTHING
    assert (acme.HasField("allow_draft_override"), acme.HasField("streaming")) == (True, False)
