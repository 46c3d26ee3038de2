"""A tenants file that is wrong says so in its own names, not in protobuf's."""

from __future__ import annotations

import pytest

from draftwood.admin.v1.tenants_pb2 import LEARNING_SCOPE_NOTHING, Tenant
from draftwood_errors import InvalidInputError, InvalidValueError
from draftwood_tenants.file import read_content
from draftwood_tenants.reading import ServerLimits

X = "weight: 2\nexperiments:\n- {name: experiments/x"
LIMITS = ServerLimits("hybrid", 64, 1_000_000, 2**24)
ARMS = "arms: [{id: control}, {id: trie, drafting: {strategy: trie}}]"
TRIE = "drafting: {strategy: trie, options: {"


@pytest.mark.parametrize(
    ("entry", "problem"),  # of the first tenant, unless it says another place
    [
        ("wieght: 2", "wieght: there is no such field; did you mean weight"),
        ("weight: heavy", "weight heavy: must be a number"),
        ("drafting: trie", "drafting trie: must be a mapping"),
        ("drafting: {stratgy: trie}", "drafting.stratgy: there is no such field; did you mean strategy"),
        ("drafting: {strategy: 5.0}", "drafting.strategy 5.0: must be a text"),
        ("zzzz: 1", "zzzz: there is no such field; there are name, description, etag"),
        ("allowDraftOverride: 1", "allowDraftOverride 1: must be true or false"),
        ("drafting: {maxNodes: 2.5}", "drafting.maxNodes 2.5: must be a whole number"),
        ("learning: {scope: ALL}", "learning.scope ALL: must be one of LEARNING_SCOPE_NOTHING,"),
        ("learning: {scope: true}", "learning.scope True: must be one of LEARNING_SCOPE_NOTHING,"),
        (f"description: {'x' * 1001}", "description: has 1001 characters; at most 1000"),
        ("weight: 100.5", "weight: 100.5 is not allowed; it must lie in [0.01, 100]"),
        ("quotas: {requestsPerMinute: 0}", "quotas.requests_per_minute: 0 is not allowed; it must be at least 1"),
        ("quotas: {tokensPerMinute: 0}", "quotas.tokens_per_minute: 0 is not allowed; it must be at least 1"),
        ("quotas: {concurrency: 0}", "quotas.concurrency: 0 is not allowed; it must be at least 1"),
        ("drafting: {strategy: x}", "drafting.strategy: 'x' is not allowed; it must be one of"),
        ("drafting: {maxNodes: 65}", "drafting.max_nodes: 65 is not allowed; it must lie in [0, 64]"),
        (TRIE + "x: 1}}", "drafting.options.x: there is no such option; there are: branch_length,"),
        (TRIE + "branch_length: 0}}", "drafting.options.branch_length: 0 is not allowed; it must lie in"),
        (TRIE + "branch_length: true}}", "drafting.options.branch_length: True is not allowed"),
        (TRIE + "branch_length: [8]}}", "drafting.options.branch_length: must be a number, a text, true or"),
        (TRIE + "learn: both}}", "drafting.options.learn: follows from learning.scope of the tenant"),
        ("drafting: {options: {sources: a}}", "drafting.options: no strategy is named 'a'"),
        ("learning: {idleTtl: 0.9s}", "learning.idle_ttl: 0.9 is not allowed; it must lie in [1, 316,224,000]"),
        ("learning: {maxAge: 59s}", "learning.max_age: 59.0 is not allowed; it must lie in [60,"),
        ("learning: {maxTokens: 1000001}", "learning.max_tokens: 1000001 is not allowed; it must lie in [1,024,"),
        ("learning: {maxBytes: 65535}", "learning.max_bytes: 65535 is not allowed; it must lie in [65,536,"),
        ("streaming: {cadence: 3600s}", "streaming.cadence: 3600.0 is not allowed"),
        ("sampling: {logitBias: {3: 1}}", "sampling.logit_bias: cannot be a default"),
        ("weight: 2\n- name: acme", 'tenants[1].name acme: must be "tenants/" and the id of the tenant'),
        (f"{X}, arms: 3}}", "experiments[0].arms 3: must be a list"),
        (f"{X}, arms: [{{id: control}}, {{id: 5}}]}}", "experiments[0].arms[1].id 5: must be a text"),
        (f"{X}, arms: [{{id: a}}]}}", "experiments[0].arms: 1 of them; 2 to 8 are needed"),
        (f"{X}, arms: [{{id: a}}, {{id: a}}]}}", "experiments[0].arms: ['a', 'a']; names that differ are needed"),
        (f"{X}, tenants: [a, '']}}", "experiments[0].tenants[1]: must be 1 to 128 letters"),
        (f"{X}, guardrails: {{slowerTtft: -1}}, {ARMS}}}", "experiments[0].guardrails.slower_ttft: "),
        (f"{X}, salt: zz, {ARMS}}}", "experiments[0].salt zz: must be hexadecimal digits"),
        (f"{X}, coverage: 0, {ARMS}}}", "experiments[0].coverage: 0.0 is not allowed; it must be above 0"),
        (f"{X}, coverage: 1.1, {ARMS}}}", "experiments[0].coverage: 1.1 is not allowed; it must be above 0"),
        (f"{X}, alpha: 1, {ARMS}}}", "experiments[0].alpha: 1.0 is not allowed; it must be between 0 and 1"),
        (f"{X}, arms: [{{id: a}}, {{id: b, weight: 0}}]}}", "experiments[0].arms[1].weight: 0.0 is not allowed;"),
    ],
)
def test_the_place_the_value_and_what_is_wanted(entry: str, problem: str) -> None:
    text = f"tenants:\n- name: tenants/acme\n  {entry}\n"
    with pytest.raises(InvalidValueError) as raised:
        read_content(text.encode(), LIMITS)
    place = "" if problem.startswith(("tenants[", "experiments[")) else "tenants[0]."
    assert str(raised.value).startswith(place + problem)
    assert "draftwood.v1" not in str(raised.value)


A, B = (f"{{name: experiments/{name}, state: EXPERIMENT_STATE_RUNNING, " for name in "ab")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tenants: [", "tenants_file: not valid YAML: while parsing a flow"),
        (b"tenants: \xff", "tenants_file: not valid YAML"),
        ("tenants: [&x {name: tenants/a}, *x]", "tenants_file: not valid YAML: aliases are not allowed"),
        ("- tenants", "tenants_file: must be a mapping with the keys tenants and experiments"),
        ("tenant: []", "tenants_file: must be a mapping with the keys tenants and experiments"),
        ("tenants: {}", "tenants: must be a list"),
        ("tenants: [acme]", "tenants[0]: must be a mapping"),
        ("tenants: [{name: tenants/a, learning: {maxAge: soon}}]", "tenants[0]"),
        ("tenants: [{name: tenants/a}, {name: tenants/a}]", "tenants[1].name a: is in the file twice"),
        ("tenants: [{name: tenants/a, etag: '1'}]", "tenants[0].etag: cannot be set in a file"),
        (f"experiments: [{A}{ARMS}}}, {B}{ARMS}}}]", "experiments[1].tenants: a is running"),
        (f"experiments: [{A}burnIn: 60s, {ARMS}}}]", "experiments[0].startTime: a running one with a burnIn needs it"),
    ],
)
def test_a_file_that_is_wrong_as_a_whole(text: str | bytes, problem: str) -> None:
    with pytest.raises((InvalidInputError, InvalidValueError)) as raised:
        read_content(text if isinstance(text, bytes) else text.encode(), LIMITS)
    assert str(raised.value).startswith(problem)


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
- name: tenants/other
  weight: 100
  description: %s
  drafting: {maxNodes: 64}
  learning: {scope: 1, idleTtl: 1s, maxTokens: 1000000, maxBytes: 65536}
""" % (b"x" * 1000)
    tenants = read_content(text, LIMITS).tenants
    acme, other = (Tenant.FromString(tenants[name].value) for name in ("acme", "other"))
    assert (acme.weight, acme.learning.max_tokens, acme.quotas.requests_per_minute) == (2.5, 4096, 5)
    assert acme.learning.scope == other.learning.scope == LEARNING_SCOPE_NOTHING
    assert (acme.HasField("allow_draft_override"), acme.HasField("streaming")) == (True, False)
