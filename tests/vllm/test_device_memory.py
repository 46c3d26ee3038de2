"""Tenants' memories beside drafts on the device: who drafts from what, what is learned, and what reaches the store."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from draftwood_memory import Memory, RedisClient
from draftwood_memory.engines.draft_metrics import DataPoint
from draftwood_memory.engines.policy import RequestPolicy, SettingsPolicy
from draftwood_memory.engines.session import Session
from draftwood_memory.operations import PurgeMemory
from draftwood_memory.settings import MemorySettings
from draftwood_tenants.config import LearningConfig, LearningScope, TenantConfig
from draftwood_tenants.engines import TenantPolicy
from draftwood_vllm import host_copies
from draftwood_vllm.device_drafts import Decision, Load, Purge
from draftwood_vllm.device_memory import Arrival, DeviceMemory
from tests.memory.servers import Valkey, wait_for

FINGERPRINT = "0123456789abcdef"
SETTINGS = MemorySettings(strategy="trie")
ANSWER = [11, 12, 13, 14, 15]


@contextmanager
def opened(
    store: str | None = None, policy: RequestPolicy | None = None, regions: int = 4, **others: Any
) -> Iterator[DeviceMemory]:
    memory = Memory(None if store is None else RedisClient(store), FINGERPRINT)
    made = DeviceMemory(memory, policy or SettingsPolicy(SETTINGS, "default"), torch.device("cpu"), regions, **others)
    made.start()
    try:
        yield made
    finally:
        made.close()


def arrival(name: str, prompt: Sequence[int] | None = (1, 2, 3), tokens: int | None = 99, **options: Any) -> Arrival:
    read = None if prompt is None else np.array(prompt, np.int32)
    return Arrival(name, read, options, stop_token_ids=(99,), max_tokens=tokens)


def write(memory: DeviceMemory, rows: dict[str, Sequence[int]], drafted: int = 0) -> None:
    """A step in which requests write tokens."""
    written = torch.zeros((len(rows), 10), dtype=torch.int32)
    for i, tokens in enumerate(rows.values()):
        written[i, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        written[i, -2], written[i, -1] = len(tokens), drafted
    memory.written([*rows], written)


def learned(memory: DeviceMemory, tenant: str) -> list[list[int]]:
    """What the memory of a tenant has in this process."""
    found = [one for one in memory.memory.residents.all() if one.name.tenant == tenant]
    return [logged.record.tokens.tolist() for one in found for logged in one.log]


def applied(memory: DeviceMemory, kind: type) -> list[Load | Purge]:
    """Changes for the device, once one of a kind has come."""
    found: list[Load | Purge] = []

    def came() -> bool:
        found.extend(memory.changes())
        return any(isinstance(one, kind) for one in found)

    wait_for(came, kind.__name__)
    return found


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("default", True, 48)),
        ({"draftwood_tenant": "acme", "draftwood_learn": 0}, ("acme", False, 48)),
        ({"draftwood_tenant": ""}, ("", False, 48)),
        ({"draftwood": "off"}, ("", False, 0)),
        ({"draftwood_strategy": "none"}, ("", False, 0)),
        ({"draftwood_max_nodes": 3}, ("default", True, 3)),
        ({"draftwood_max_nodes": "many"}, ("", False, 0)),
        ({"draftwood_strategy": "unknown"}, ("", False, 0)),
    ],
)
def test_what_a_request_says_of_its_drafts(given: dict[str, Any], expected: tuple[str, bool, int]) -> None:
    """As on the host: `tests/memory/engines`."""
    tenant, learns, nodes = expected
    with opened() as memory:
        decision = memory.join(arrival("a", **given))
        assert (decision.learns, decision.nodes) == (learns, nodes)
        assert decision.region.endswith(f":{tenant}:") if tenant else decision.region == ""


def test_a_prompt_without_tokens_is_not_drafted_for() -> None:
    with opened() as memory:
        assert memory.join(arrival("embeddings", None)) == Decision("", False, 0)


class OneTenant:
    """A catalog: the tenant "quiet" learns nothing, and there are no experiments."""

    version = 0

    def config_of(self, tenant: str) -> TenantConfig:
        scope = LearningScope.NOTHING if tenant == "quiet" else LearningScope.OUTPUTS
        return TenantConfig(learning=LearningConfig(scope=scope))

    def experiments(self) -> Iterator[Any]:
        return iter(())


def test_a_tenants_configuration_holds() -> None:
    catalog: Any = OneTenant()
    with opened(policy=TenantPolicy(catalog, SETTINGS, "", lambda assignment, outcome: None)) as memory:
        assert memory.join(arrival("a", draftwood_tenant="quiet")).learns is False
        assert memory.join(arrival("b", draftwood_tenant="other")).learns is True


def test_an_answer_is_learned_when_it_ends() -> None:
    stepped: list[Sequence[Session]] = []
    with opened(on_drafts=stepped.append) as memory:
        memory.join(arrival("a"))
        write(memory, {"a": ANSWER[:1]}, drafted=4)
        write(memory, {"a": ANSWER[1:4], "unknown": [7]}, drafted=2)
        write(memory, {"a": ANSWER[4:]})
        assert learned(memory, "default") == []
        memory.end("a")
        memory.take_in()
        assert (learned(memory, "default"), len(memory)) == ([ANSWER], 0)
        stats = stepped[0][0].stats
        assert (stats.decode_steps, stats.drafts, stats.draft_tokens, stats.accepted_tokens) == (3, 2, 6, 2)
        assert not any(isinstance(change, Load) for change in memory.changes())  # the device has it


@pytest.mark.parametrize(
    ("tokens", "pieces", "kept"),
    [
        (None, [[11, 99], [12]], [11, 99]),
        (None, [[11, 12], [13, 99, 14], [15, 16]], [11, 12, 13, 99]),
        (3, [[11, 12], [13, 14], [15]], [11, 12, 13]),
        (9, [[11, 12], [13]], [11, 12, 13]),
    ],
)
def test_what_is_written_behind_the_end_is_not_learned(
    tokens: int | None, pieces: list[list[int]], kept: list[int]
) -> None:
    """Steps are scheduled before the end is known."""
    with opened() as memory:
        memory.join(arrival("a", tokens=tokens))
        for piece in pieces:
            write(memory, {"a": piece})
        memory.end("a")
        memory.take_in()
        assert learned(memory, "default") == [kept]


def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps go on while copies are on their way; the thread takes in the last ones when they land."""
    under_way = True

    class Event:
        def query(self) -> bool:
            return not under_way

    send = host_copies.HostCopies.send

    def slowly(self: Any, tensor: Any, about: Any) -> None:
        send(self, tensor, about)
        self._items[-1] = self._items[-1]._replace(landed=Event())

    monkeypatch.setattr(host_copies.HostCopies, "send", slowly)
    with opened() as memory:
        memory.join(arrival("a"))
        for token in ANSWER:
            write(memory, {"a": [token]})
        memory.end("a")
        memory.take_in()
        assert learned(memory, "default") == []
        memory.join(arrival("a"))  # the id is used again
        under_way = False
        wait_for(lambda: learned(memory, "default") == [ANSWER], "the answer")


def test_a_request_that_was_preempted_goes_on() -> None:
    with opened() as memory:
        first = memory.join(arrival("a"))
        write(memory, {"a": ANSWER[:2]})
        write(memory, {"a": [77]})  # dropped, as it was scheduled ahead
        memory.preempt("a")
        assert memory.join(arrival("a"), np.array(ANSWER[:2], np.int32)) == first
        write(memory, {"a": ANSWER[2:]})
        memory.end("a")
        memory.take_in()
        assert learned(memory, "default") == [ANSWER]


def test_another_replicas_answers_are_loaded() -> None:
    with Valkey() as store:
        with opened(store.url) as memory:
            memory.join(arrival("a"))
            write(memory, {"a": ANSWER})
            memory.end("a")
            memory.take_in()
            wait_for(lambda: memory.memory.counters().outbox_records == 0, "the outbox")
        with opened(store.url) as memory:
            region = memory.join(arrival("b")).region
            loads = [one for one in applied(memory, Load) if isinstance(one, Load)]
            assert [(one.region, [run.tolist() for run in one.runs]) for one in loads] == [(region, [ANSWER])]
            assert memory.changes() == []


def test_a_purge_empties_the_region_and_mutes_its_requests() -> None:
    with Valkey() as store, opened(store.url) as memory:
        memory.join(arrival("done"))
        write(memory, {"done": ANSWER})
        memory.end("done")
        region = memory.join(arrival("running")).region
        memory.join(arrival("of another tenant", draftwood_tenant="other"))
        memory.take_in()
        wait_for(lambda: memory.memory.counters().outbox_records == 0, "the outbox")
        memory.changes()
        memory.memory.submit(PurgeMemory("default")).result(10)
        assert Purge(region, ["running"]) in applied(memory, Purge)
        memory.preempt("running")
        assert memory.join(arrival("running")).learns is False
        assert memory.join(arrival("new")).learns is True
        write(memory, {"running": [21, 22]})
        memory.end("running")
        memory.take_in()
        assert learned(memory, "default") == []


def test_a_region_makes_room_for_another_one_and_is_loaded_again() -> None:
    with opened(regions=1) as memory:
        first = memory.join(arrival("a", draftwood_tenant="first")).region
        assert memory.join(arrival("b", draftwood_tenant="second")) == Decision(
            "", False, 48
        )  # the other one is in use
        write(memory, {"a": ANSWER, "b": ANSWER[::-1]})
        memory.end("a")
        memory.end("b")
        memory.take_in()
        assert (learned(memory, "first"), learned(memory, "second")) == ([ANSWER], [ANSWER[::-1]])
        second = memory.join(arrival("c", draftwood_tenant="second")).region
        assert second != first
        changes = applied(memory, Load)
        assert Purge(first, []) in changes
        [load] = [one for one in changes if isinstance(one, Load)]
        assert (load.region, [run.tolist() for run in load.runs]) == (second, [ANSWER[::-1]])
        memory.end("c")
        assert memory.join(arrival("d", draftwood_tenant="first")).region == first
        [load] = [one for one in applied(memory, Load) if isinstance(one, Load)]
        assert (load.region, [run.tolist() for run in load.runs]) == (first, [ANSWER])


def test_a_memory_that_is_loaded_while_its_first_request_runs_keeps_its_text() -> None:
    """The region is not emptied for it, and the answer is not loaded a second time."""
    with Valkey() as store:
        with opened(store.url) as memory:
            memory.join(arrival("a"))
            write(memory, {"a": ANSWER})
            memory.end("a")
            memory.take_in()
            wait_for(lambda: memory.memory.counters().outbox_records == 0, "the outbox")
        with opened(store.url) as memory:
            region = memory.join(arrival("b")).region
            write(memory, {"b": [21, 22, 23]})
            [load] = applied(memory, Load)
            assert isinstance(load, Load)
            assert [run.tolist() for run in load.runs] == [ANSWER]
            memory.end("b")
            memory.take_in()
            assert learned(memory, "default") == [ANSWER, [21, 22, 23]]
            assert (region, memory.changes()) == (load.region, [])


def test_large_memories_are_loaded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood_vllm.device_memory._LOAD_TOKENS", 10)
    with opened() as memory:
        region = memory.join(arrival("a")).region
        memory.changes()
        for start in range(0, 40, 8):
            memory._changes.put((region, np.arange(start, start + 8, dtype=np.int32)))
        pieces = [memory.changes() for _ in range(4)]
        assert [[len(one.runs) for one in piece if isinstance(one, Load)] for piece in pieces] == [[2], [2], [1], []]


def test_refused_requests_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with opened() as memory, caplog.at_level(logging.WARNING):
        for name in "abc":
            memory.join(arrival(name, draftwood_max_nodes="many"))
    assert caplog.text.count("requests are not drafted for: draftwood_max_nodes") == 1


def test_metrics_are_those_of_the_host() -> None:
    published: list[list[DataPoint]] = []
    with opened(publish=published.append) as memory:
        memory.join(arrival("a"))
        write(memory, {"a": ANSWER})
        wait_for(lambda: len(published) > 0, "metrics")
        memory._published_at = 0.0
        memory.end("a")
        wait_for(lambda: len(published) > 1, "metrics")
    values = {metric.name: value for metric, labels, value in published[-1]}
    assert (values["draftwood_output_tokens"], values["draftwood_drafting_up"]) == (len(ANSWER), 1.0)
