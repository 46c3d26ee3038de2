"""A server of each engine beside one of Draftwood's own, on one Valkey, and the gateway in front of it."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from draftwood_benchmarks.harness.servers import running_gateway
from draftwood_client import AdminClient, Client, DraftConfig, Experiment, ExperimentArm
from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL
from tests.engines.servers import ENGINES, Served, served_by, until
from tests.engines.test_drafts import OPTIONS, accepted, learned
from tests.memory.servers import Valkey
from tests.model_runner.loading.templates import HERMES

pytestmark = pytest.mark.timeout(600)


class Pair(NamedTuple):
    """A server of Draftwood's own engine and one of the engine that is tested."""

    own: Served
    other: Served


@pytest.fixture(scope="module", params=ENGINES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Their model's chat template has tools, though it was never trained on them."""
    folder = tmp_path_factory.mktemp("tools") / "draftwood-demo"
    shutil.copytree(BUNDLED_MODEL, folder)
    (folder / "chat_template.jinja").write_text(HERMES, encoding="utf-8")
    with Valkey() as store:
        flags = ("--store", store.url, "--audit-share", "1")
        with (
            served_by("draftwood", *flags, tenants=None, model=str(folder), context=512) as own,
            served_by(request.param, *flags, tenants=None, model=str(folder), context=512) as other,
        ):
            yield Pair(own, other)


@pytest.fixture
def client(pair: Pair) -> Iterator[Client]:
    """Of the engine that is tested."""
    with Client(pair.other.target, timeout=100) as client:
        yield client


def test_engines_share_memories(pair: Pair, client: Client) -> None:
    with Client(pair.own.target, timeout=100) as own:
        learned(own, "shared")
        until(lambda: accepted(client, "shared", learn=False) >= 15)
        other: Any = {"prompt": [1, *range(300, 330)], "tenant": "shared", **OPTIONS}
        client.generate(**other)
        until(lambda: own.generate(**other, learn=False).drafting.accepted_tokens >= 15)


def test_a_live_experiment_counts_what_its_clients_saw(pair: Pair, client: Client) -> None:
    strategies = {"trie": "trie", "plain": "none"}
    arms = [ExperimentArm(id=name, drafting=DraftConfig(strategy=of)) for name, of in strategies.items()]
    seen = Counter[str]()

    def ask(number: int) -> str:
        answer = client.generate(
            "Once upon a time", tenant="trial", session=f"session {number}", max_tokens=10, ignore_eos=True
        )
        assert answer.arm != "plain" or answer.drafting.draft_tokens == 0
        seen.update([answer.arm] if answer.arm else [])
        return answer.arm

    with AdminClient(pair.other.target) as admin:
        admin.experiments.create("live", Experiment(tenants=("trial",), arms=arms))
        admin.experiments.start("live")
        until(lambda: bool(ask(0)))
        for number in range(24):
            ask(number)
        assert seen.keys() == {"trie", "plain"}

        def counted() -> dict[str, int]:
            return {arm.arm: arm.requests for arm in admin.experiments.report("live").arms}

        until(lambda: sum(counted().values()) >= 25)
        assert counted() == seen
        admin.experiments.stop("live")


def asked(url: str, **fields: Any) -> Any:
    """The choice that the gateway's answer has."""
    body = json.dumps({"model": "draftwood-demo", "max_tokens": 120, **fields}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=100) as answer:
        return json.load(answer)["choices"][0]


def test_tools_are_called_through_the_gateway(pair: Pair) -> None:
    parameters = {
        "type": "object",
        "properties": {"order": {"type": "integer", "minimum": 1, "maximum": 9999}},
        "required": ["order"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "track", "parameters": parameters}}
    question = [{"role": "user", "content": "Where is my parcel?"}]
    with running_gateway(pair.other.target) as gateway:
        url = f"http://{gateway.target}"
        options = {"messages": question, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
        for drafting in ({"drafting": False}, {"strategy": "trie"}, {"strategy": "trie"}):
            found = asked(url, **options, draftwood=drafting)
            assert found["finish_reason"] == "tool_calls"
            [call] = found["message"]["tool_calls"]
            assert call["function"]["name"] == "track"
            [(name, order)] = json.loads(call["function"]["arguments"]).items()
            assert name == "order"
            assert 1 <= order <= 9999
        plain = asked(url, **{**options, "tool_choice": "none"})
        assert plain["message"]["content"]
        assert not plain["message"].get("tool_calls")


def test_audits_find_no_difference(pair: Pair, client: Client) -> None:
    accepted(client, "audited")
    accepted(client, "audited")
    with AdminClient(pair.other.target) as audit:
        until(lambda: sum(count.audited for count in audit.audit_report().counts) >= 2)
        counts = audit.audit_report().counts
    assert [(count.differing, count.failed) for count in counts] == [(0, 0)] * len(counts)
