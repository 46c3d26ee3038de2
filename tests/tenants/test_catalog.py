"""What is known of tenants and experiments: the file before the store, and of the store what this server allows."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import json_format

from draftwood.admin.v1 import experiments_pb2, tenants_pb2
from draftwood_strategies.drafting import DraftChoice
from draftwood_strategies.registry import know_offered
from draftwood_tenants.catalog import Catalog, message_of, write_of
from draftwood_tenants.config import LearningScope, TenantConfig
from draftwood_tenants.experiments.definition import ExperimentState
from draftwood_tenants.file import SETTING, read_content
from draftwood_tenants.followed_file import FollowedFile
from draftwood_tenants.reading import ServerLimits
from draftwood_tenants.resources.follower import ResourceFollower
from draftwood_tenants.resources.store import STOPS, TENANTS, ConfigurationUnknownError, InProcessResources, Write
from tests.strategies.fakes import own_records

LIMITS = ServerLimits("trie", 32, 1_000_000, 2**24)
ARMS = [{"id": "control"}, {"id": "off", "drafting": {"strategy": "none"}}]


class Known:
    """A catalog over a store in this process, and a file if it has a text."""

    def __init__(self, folder: Path, text: str = "") -> None:
        (folder / "tenants.yaml").write_text(text)
        self.stored = ResourceFollower(InProcessResources())
        file = FollowedFile(SETTING, folder / "tenants.yaml", lambda data: read_content(data, LIMITS))
        self.catalog = Catalog(self.stored, file if text else None, LIMITS)

    async def store(self, name: str, **fields: object) -> None:
        """Creates or changes a resource, in the JSON form of its message."""
        message = tenants_pb2.Tenant() if name.startswith(TENANTS) else experiments_pb2.Experiment()
        before = self.stored.of_kind(name.partition("/")[0]).get(name.partition("/")[2])
        etag = "" if before is None else message_of(before, type(message)).etag
        await self.stored.write([write_of(json_format.ParseDict({"name": name, "etag": etag} | fields, message))])


async def test_a_part_that_this_server_does_not_allow_costs_itself(tmp_path: Path) -> None:
    known = Known(tmp_path)
    allowed = {"quotas": {"concurrency": 3}, "allowDraftOverride": False}
    wrong = {
        "drafting": {"strategy": "another server's"},
        "weight": 1000,
        "description": "x" * 1001,
        "learning": {"maxTokens": 10**9},
    }
    await known.store("tenants/a", **allowed, **wrong)
    found = known.catalog.config_of("a")
    assert (found.quotas.concurrency, found.allow_draft_override) == (3, False)
    assert (found.drafting, found.weight) == (TenantConfig().drafting, None)
    assert found.learning.scope is LearningScope.NOTHING


async def test_a_tenant_whose_head_is_no_longer_loaded_drafts_by_the_default(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And an experiment with an arm of it does not run."""
    try:
        know_offered(["head"])
        known = Known(tmp_path)
        await known.store("tenants/a", drafting={"strategy": "head", "maxNodes": 7}, quotas={"concurrency": 3})
        arms = [{"id": "control"}, {"id": "head", "drafting": {"strategy": "head"}}]
        await known.store("experiments/x", salt="00" * 16, arms=arms)
        assert known.catalog.config_of("a").drafting == DraftChoice("head", (), 7)
        assert [experiment.name for experiment in known.catalog.experiments()] == ["x"]
        know_offered([])
        restarted = Catalog(known.stored, None, LIMITS)
        config = restarted.config_of("a")
        assert (config.drafting, config.quotas.concurrency) == (DraftChoice(), 3)
        assert [*restarted.experiments()] == []
    finally:
        know_offered([])
    hint = "head is there if `draftwood serve` has --draft-head"
    logged = [record.message for record in own_records(caplog)]
    assert [hint in message for message in logged] == [True, True]


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"streaming": {"cadence": "3600s"}}, "streaming.cadence"),
        ({"streaming": {"paddingBytes": 1_000_000}}, "streaming.padding_bytes"),
        ({"quotas": {"requestsPerMinute": 0}}, "quotas.requests_per_minute"),
    ],
)
async def test_a_part_that_bounds_a_tenant_keeps_the_configuration_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, part: dict[str, object], field: str
) -> None:
    known = Known(tmp_path)
    await known.store("tenants/a", **part)
    for _ in range(2):
        with pytest.raises(ConfigurationUnknownError):
            known.catalog.config_of("a")
    assert caplog.text.count(f"tenants/a: {field}") == 1
    await known.store("tenants/a", weight=2)
    assert known.catalog.config_of("a").weight == 2
    await known.store("tenants/a", weight=3, **part)
    assert known.catalog.config_of("a").weight == 2
    revision = known.stored.of_kind(TENANTS)["a"].revision
    await known.stored.write([Write(TENANTS, "a", b"\xff", revision), Write(TENANTS, "b", b"\xff", 0)])  # of no version
    assert known.catalog.config_of("a").weight == 2
    with pytest.raises(ConfigurationUnknownError):
        known.catalog.config_of("b")
    assert known.catalog.config_of("c") == TenantConfig()


async def test_the_file_hides_what_is_stored(tmp_path: Path) -> None:
    known = Known(
        tmp_path, f"tenants: [{{name: tenants/a, weight: 2}}]\nexperiments: [{{name: experiments/x, arms: {ARMS}}}]"
    )
    for name in "ab":
        await known.store(f"tenants/{name}", weight=7)
    for name in "xy":
        await known.store(f"experiments/{name}", salt="00" * 16, arms=ARMS, alpha=0.01)
    await known.store("experiments/wrong", salt="00" * 16, arms=ARMS[:1])
    assert [known.catalog.config_of(name).weight for name in "ab"] == [2, 7]
    assert [(experiment.name, experiment.alpha) for experiment in known.catalog.experiments()] == [
        ("x", 0.05),
        ("y", 0.01),
    ]
    assert (known.catalog.names(TENANTS), known.catalog.names("experiments")) == (["a", "b"], ["wrong", "x", "y"])
    tenants = [known.catalog.tenant_message(name) for name in "abc"]
    shown = [known.catalog.experiment_message(name) for name in ("x", "y", "z")]
    file, stored = tenants_pb2.RESOURCE_ORIGIN_FILE, tenants_pb2.RESOURCE_ORIGIN_UNSPECIFIED
    for first, second, missing in (tenants, shown):
        assert first is not None
        assert second is not None
        assert (first.origin, second.origin, missing) == (file, stored, None)


async def test_what_was_read_is_kept_up_to_a_bound_and_read_again_beyond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftwood_tenants.catalog._MAX_READ", 2)
    known = Known(tmp_path)
    for weight, name in enumerate("abc", 1):
        await known.store(f"tenants/{name}", weight=weight)
    a, b = known.catalog.config_of("a"), known.catalog.config_of("b")
    assert known.catalog.config_of("a") is a
    assert known.catalog.config_of("b") is b
    assert known.catalog.config_of("c").weight == 3
    assert known.catalog.config_of("a") is not a
    assert known.catalog.config_of("a") == a


@pytest.mark.parametrize("state", [0, experiments_pb2.EXPERIMENT_STATE_STOPPED])
async def test_a_stop_holds_for_the_definition_that_it_is_of(tmp_path: Path, state: int) -> None:
    text = "experiments: [{name: experiments/x, state: EXPERIMENT_STATE_RUNNING, arms: %s}]"
    known = Known(tmp_path, text % ARMS)
    [running] = known.catalog.experiments()
    stop = experiments_pb2.Experiment(salt=running.digest, state=state)  # type: ignore[arg-type]
    stop.stopped_arms.add(arm="off")
    stop.end_time.seconds = 5
    assert known.catalog.stops_revision("x") == 0
    revision = (await known.stored.write([Write(STOPS, "x", stop.SerializeToString(), 0)]))[0]
    assert known.catalog.stops_revision("x") == revision
    expected = ExperimentState.STOPPED if state else ExperimentState.RUNNING
    assert [(experiment.stopped, experiment.state) for experiment in known.catalog.experiments()] == [
        (frozenset({"off"}), expected)
    ]
    shown = known.catalog.experiment_message("x")
    assert shown is not None
    assert ([arm.arm for arm in shown.stopped_arms], shown.end_time.seconds) == (["off"], 5 if state else 0)
    assert shown.state == (state or experiments_pb2.EXPERIMENT_STATE_RUNNING)
    other = Known(tmp_path, text % [*ARMS, {"id": "third"}])
    await other.stored.write([Write(STOPS, "x", stop.SerializeToString(), 0)])
    [changed] = other.catalog.experiments()
    assert (changed.stopped, changed.state) == (frozenset(), ExperimentState.RUNNING)
    message = other.catalog.experiment_message("x")
    assert message is not None
    assert not message.stopped_arms


def test_a_file_is_not_read_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.yaml"
    path.write_bytes(b"old")
    file = FollowedFile("--auth-file", path, bytes)
    path.write_bytes(b"")  # an editor writes the rest a moment later
    monkeypatch.setattr("draftwood_tenants.followed_file.time.sleep", lambda _: path.write_bytes(b"new"))
    assert not file.look()
    assert file.value == b"old"
    assert file.look()
    assert file.value == b"new"
