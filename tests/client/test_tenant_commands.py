"""`draftwood tenant` over a real channel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from google.protobuf.json_format import ParseDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftwood.admin.v1 import tenants_pb2 as pb
from tests.client.conftest import Cli
from tests.client.fake_admin import FakeAdmin

ACME = {
    "name": "tenants/acme",
    "etag": "a",
    "origin": "RESOURCE_ORIGIN_API",
    "description": "Ölförderung \x1b[31m",
    "drafting": {"strategy": "trie", "options": {"branch_length": 8}},
    "learning": {"idleTtl": "129600s"},
    "quotas": {"requestsPerMinute": 1200},
    "weight": 2,
}


@pytest.fixture
def acme(admin: FakeAdmin) -> pb.Tenant:
    tenant = admin.tenants.held["tenants/acme"] = ParseDict(ACME, pb.Tenant())
    return tenant


def stored(admin: FakeAdmin, name: str = "acme") -> pb.Tenant:
    tenant: pb.Tenant = admin.tenants.held[f"tenants/{name}"]
    return tenant


def test_list(admin: FakeAdmin, run_admin: Cli, acme: pb.Tenant) -> None:
    admin.tenants.held.clear()
    assert run_admin("tenant", "list").stdout == "no tenants\n"
    assert json.loads(run_admin("tenant", "list", "--json").stdout) == {"tenants": []}
    admin.tenants.page = 1
    admin.tenants.held["tenants/acme"] = acme
    admin.tenants.held["tenants/beta"] = pb.Tenant(name="tenants/beta", origin=pb.RESOURCE_ORIGIN_FILE)
    head, first, second = run_admin("tenant", "list").stdout.splitlines()
    assert head.split()[:4] == ["tenant", "from", "drafting", "requests/min"]
    assert first.split()[:8] == ["acme", "API", "trie", "branch_length=8", "1,200", "-", "-", "2"]
    assert r"Ölförderung \x1b[31m" in first
    assert second.split()[:3] == ["beta", "file", "-"]
    listed = json.loads(run_admin("tenant", "list", "--json").stdout)
    assert [tenant["name"] for tenant in listed["tenants"]] == ["tenants/acme", "tenants/beta"]


def test_show_prints_what_apply_takes(admin: FakeAdmin, run_admin: Cli, acme: pb.Tenant, tmp_path: Path) -> None:
    shown = run_admin("tenant", "show", "acme").stdout
    assert yaml.safe_load(shown) == {name: ACME[name] for name in ACME if name not in ("etag", "origin")}
    assert "# etag: a\n" in shown
    assert json.loads(run_admin("tenant", "show", "acme", "--json").stdout) == ACME
    file = tmp_path / "acme.yaml"
    file.write_text(shown)
    assert run_admin("tenant", "apply", "-f", str(file)).stdout == "tenant acme is as in the file\n"
    assert admin.tenants.writes == []


def test_create_from_fields_and_a_file(admin: FakeAdmin, run_admin: Cli, tmp_path: Path) -> None:
    file = tmp_path / "beta.yaml"
    file.write_text("name: beta\nquotas: {requests_per_minute: 60}\nlearning: {idleTtl: 1h30m, scope: nothing}\n")
    dry = run_admin("tenant", "create", "-f", str(file), "weight=0.5", "--dry-run")
    assert (dry.stdout.splitlines()[0], admin.tenants.held) == ("tenant beta would be created", {})
    assert run_admin("tenant", "create", "-f", str(file), "weight=0.5").exit_code == 0
    made = stored(admin, "beta")
    assert made.quotas.requests_per_minute == 60
    assert (made.learning.idle_ttl.seconds, made.learning.scope, made.weight) == (5400, pb.LEARNING_SCOPE_NOTHING, 0.5)
    again = run_admin("tenant", "create", "beta")
    assert (again.stderr, again.exit_code) == ("error: tenants/beta: exists already\n", 1)
    assert run_admin("tenant", "create", "other", "-f", str(file)).stderr.startswith("error: NAME: is other, and the")
    assert run_admin("tenant", "create").stderr.startswith("error: NAME: must be given")


def test_set_changes_the_named_fields_only(admin: FakeAdmin, run_admin: Cli, acme: pb.Tenant) -> None:
    settings = ["drafting.strategy=hybrid", "drafting.options.branch_length=4", "drafting.options.learn=both"]
    more = ["quotas.requestsPerMinute=600", "learning.idle_ttl=null", "allowDraftOverride=false", "description=5"]
    result = run_admin("tenant", "set", "acme", *settings, *more)
    assert (result.stderr, result.exit_code) == ("", 0)
    assert "  drafting.options.branch_length: 8 -> 4\n" in result.stdout
    assert "  learning.idleTtl: 129600s -> unset\n" in result.stdout
    tenant = stored(admin)
    assert dict(tenant.drafting.options) == {"branch_length": 4, "learn": "both"}
    assert (tenant.drafting.strategy, tenant.quotas.requests_per_minute, tenant.weight) == ("hybrid", 600, 2)
    assert not tenant.learning.HasField("idle_ttl")
    assert tenant.HasField("allow_draft_override")
    assert tenant.description == "5"
    [(_, _, mask)] = admin.tenants.writes
    assert mask == [
        *("drafting.strategy", "drafting.options", "quotas.requests_per_minute"),
        *("learning.idle_ttl", "allow_draft_override", "description"),
    ]


def test_set_gives_a_tenant_a_configuration(admin: FakeAdmin, run_admin: Cli) -> None:
    dry = run_admin("tenant", "set", "new", "weight=2", "--dry-run")
    assert (dry.stdout, admin.tenants.held) == ("tenant new would be created\n  weight: 2\n", {})
    assert run_admin("tenant", "set", "new", "weight=2", "drafting.options.learn=both").exit_code == 0
    assert (stored(admin, "new").weight, dict(stored(admin, "new").drafting.options)) == (2, {"learn": "both"})


def test_set_keeps_what_another_changed_at_the_same_time(admin: FakeAdmin, run_admin: Cli, acme: pb.Tenant) -> None:
    def interfere() -> None:
        stored(admin).drafting.options["capacity"] = 7
        stored(admin).etag = "b"

    admin.tenants.before_write = interfere
    assert run_admin("tenant", "set", "acme", "drafting.options.branch_length=4").exit_code == 0
    assert dict(stored(admin).drafting.options) == {"branch_length": 4, "capacity": 7}


def test_delete_asks_and_a_dry_run_changes_nothing(admin: FakeAdmin, run_admin: Cli, acme: pb.Tenant) -> None:
    setting = ("tenant", "set", "acme", "weight=3", "--dry-run")
    assert run_admin(*setting).stdout == "tenant acme would be changed\n  weight: 2 -> 3\n"
    assert json.loads(run_admin(*setting, "--json").stdout)["weight"] == 3
    assert run_admin("tenant", "delete", "acme", "--dry-run").stdout == "tenant acme would be deleted\n"
    assert run_admin("tenant", "delete", "acme", stdin="n\n").exit_code == 1
    assert admin.tenants.writes == []
    assert run_admin("tenant", "delete", "acme", "--yes").stdout == "tenant acme deleted\n"
    assert run_admin("tenant", "delete", "acme", "--yes").exit_code == 1
    assert run_admin("tenant", "delete", "acme", "--yes", "--allow-missing").exit_code == 0


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("weigth=2", "weigth: there is no such field; did you mean weight? (description, drafting,"),
        ("drafting.strateg=x", "drafting.strateg: there is no such field; did you mean strategy?"),
        ("etag=x", "etag: there is no such field; there are: description"),
        ("weight=heavy", "weight: must be a number, not 'heavy'"),
        ("weight=true", "weight: must be a number, not True"),
        ("quotas.concurrency=1.5", "quotas.concurrency: must be a whole number, not 1.5"),
        ("quotas.concurrency=99999999999", "Tenant: Failed to parse quotas field: Failed to parse concurrency"),
        ("allowDraftOverride=yes", "allowDraftOverride: must be true or false, not 'yes'"),
        ("learning.idleTtl=5", "learning.idleTtl: '5' is no duration; write it as 90s, 5m, 1h30m, 500ms or 2d"),
        ("learning.scope=output", "learning.scope: 'output' is unknown; did you mean outputs?"),
        ("weight.x=1", "weight.x: weight is a single value"),
        ("weight", "weight: must be FIELD=VALUE"),
        ("drafting=trie", "drafting: must be a mapping of fields, not 'trie'"),
    ],
)
def test_wrong_settings(admin: FakeAdmin, run_admin: Cli, acme: pb.Tenant, setting: str, problem: str) -> None:
    result = run_admin("tenant", "set", "acme", setting)
    assert result.stderr.startswith(f"error: {problem}")
    assert (result.stderr.count("\n"), result.exit_code) == (1, 2)
    assert admin.tenants.writes == []


def test_apply_creates_changes_and_leaves(admin: FakeAdmin, run_admin: Cli, acme: pb.Tenant, tmp_path: Path) -> None:
    file = tmp_path / "all.yaml"
    file.write_text("tenants:\n- {name: tenants/acme, weight: 2, drafting: {strategy: trie}}\n- {name: beta}\n")
    dry = run_admin("tenant", "apply", "-f", str(file), "--dry-run").stdout
    assert "tenant acme would be changed\n" in dry
    assert "  quotas.requestsPerMinute: 1200 -> unset\n" in dry
    assert "tenant beta would be created\n" in dry
    assert admin.tenants.writes == []
    assert run_admin("tenant", "apply", "-f", "-", stdin=file.read_text()).exit_code == 0
    assert stored(admin).weight == 2
    assert not stored(admin).quotas.HasField("requests_per_minute")
    assert not stored(admin).drafting.options.fields
    assert set(admin.tenants.held) == {"tenants/acme", "tenants/beta"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tenants:\n- {name: a}\n- {name: b, wait: 1}\n", "tenants[1].wait: there is no such field"),
        ("tenants:\n- {name: a, drafting: {maxNodes: 1, max_nodes: 2}}\n", "tenants[0].drafting.maxNodes: is given"),
        ("tenants:\n- {weight: 1}\n", "tenants[0].name: must be set, such as tenants/NAME"),
        ("weight: [\n", "FILE is not valid YAML, line 2"),
        ("name: a\nname: b\n", "FILE: is not valid YAML: name is there twice"),
        ("a: &x 1\nb: *x\n", "FILE: is not valid YAML: aliases are not allowed"),
        ("- a\n", "FILE: must have the fields of a tenant, or a list under tenants:"),
        ("tenants: 3\n", "FILE: tenants must be a list"),
    ],
)
def test_wrong_files(admin: FakeAdmin, run_admin: Cli, tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    result = run_admin("tenant", "apply", "-f", str(file))
    shown = result.stderr.replace(str(file), "FILE").replace("FILE: is not valid YAML, l", "FILE is not valid YAML, l")
    assert shown.startswith(f"error: {problem}")
    assert (result.stderr.count("\n"), result.exit_code) == (1, 2)
    assert admin.tenants.held == {}


def test_check_a_tenants_file(admin: FakeAdmin, run_admin: Cli, acme: pb.Tenant, tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(
        "tenants:\n- {name: tenants/acme, weight: 3}\n- {name: tenants/b, weight: 500}\n- {name: tenants/acme}\n- 1\n"
        "experiments:\n- {name: experiments/x, state: EXPERIMENT_STATE_RUNNING, arms: [{id: a}, {id: b}]}\n"
        "- {name: experiments/y, arms: [{id: a}]}\n"
    )
    result = run_admin("tenant", "check", str(file))
    assert result.exit_code == 1
    assert result.stdout.splitlines() == ["tenants[0] acme: ok", "experiments[0] x: ok"]
    assert result.stderr.splitlines() == [
        "tenants[1]: tenant.weight: 500 is not allowed; it must lie in [0.01, 100]",
        "tenants[2]: name: acme is in the file twice",
        "tenants[3]: must be a mapping of fields, not 1",
        "experiments[1]: experiment.arms: 1 of them; 2 to 8 are needed",
    ]
    assert admin.tenants.writes == admin.experiments.writes == []
    file.write_text("name: tenants/acme\nweight: 3\n")
    assert run_admin("tenant", "check", str(file)).stdout == "tenant acme: ok\n"


KINDS = [pb.Tenant.DESCRIPTOR, *(field.message_type for field in pb.Tenant.DESCRIPTOR.fields if field.message_type)]
FIELDS = st.sampled_from(["tenants", *(field.json_name for kind in KINDS for field in kind.fields)])
ANYTHING: st.SearchStrategy[object] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=()), max_size=5),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(FIELDS, values, max_size=3),
    max_leaves=9,
)


@given(st.dictionaries(FIELDS, ANYTHING, max_size=4).map(json.dumps) | st.text(max_size=20))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_file_is_applied_or_one_error(run_admin: Cli, tmp_path: Path, text: str) -> None:
    (tmp_path / "any").write_text(text, encoding="utf-8")
    applied = run_admin("tenant", "apply", "-f", str(tmp_path / "any"))
    assert applied.exit_code in (0, 1, 2)
    assert len(applied.stderr.splitlines()) == (applied.exit_code > 0)
