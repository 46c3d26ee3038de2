"""Tenants' memories beside drafts on the device: who drafts from what, what is learned, and what reaches the store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from draftwood_memory import Memory, RedisClient
from draftwood_memory.engines.draft_metrics import DataPoint
from draftwood_memory.engines.policy import SettingsPolicy
from draftwood_memory.engines.session import Session
from draftwood_memory.operations import PurgeMemory
from draftwood_memory.settings import MemorySettings
from draftwood_vllm import host_copies
from draftwood_vllm.device_drafts import Decision, Load, Purge
from draftwood_vllm.device_memory import Arrival, DeviceMemory
from tests.memory.servers import Valkey, wait_for

ANSWER = [11, 12, 13, 14, 15]


@contextmanager
def opened(store: str | None = None, regions: int = 4, **others: Any) -> Iterator[DeviceMemory]:
    memory = Memory(None if store is None else RedisClient(store), "0123456789abcdef")
    policy = SettingsPolicy(MemorySettings(strategy="trie"), "default")
    made = DeviceMemory(memory, policy, torch.device("cpu"), regions, **others)
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


def end(memory: DeviceMemory, *names: str) -> None:
    for name in names:
        memory.end(name)
    memory.take_in()


def answered(memory: DeviceMemory, name: str, tokens: Sequence[int] = ANSWER, **options: Any) -> None:
    """A request joins, writes and ends."""
    memory.join(arrival(name, **options))
    write(memory, {name: tokens})
    end(memory, name)


def learned(memory: DeviceMemory, tenant: str = "default") -> list[list[int]]:
    """What the memory of a tenant has in this process."""
    found = [one for one in memory.memory.residents.all() if one.name.tenant == tenant]
    return [logged.record.tokens.tolist() for one in found for logged in one.log]


def wait_until_stored(memory: DeviceMemory) -> None:
    wait_for(lambda: memory.memory.counters().outbox_records == 0, "the outbox")


def applied(memory: DeviceMemory, kind: type) -> list[Load | Purge]:
    """Changes for the device, once one of a kind has come."""
    found: list[Load | Purge] = []

    def came() -> bool:
        found.extend(memory.changes())
        return any(isinstance(one, kind) for one in found)

    wait_for(came, kind.__name__)
    return found


@pytest.mark.parametrize(
    ("arrived", "expected", "problem"),
    [
        (arrival("a"), ("default", True, 48), ""),
        (arrival("a", draftwood_tenant="acme", draftwood_learn=0), ("acme", False, 48), ""),
        (arrival("a", draftwood_tenant=""), ("", False, 48), ""),
        (arrival("a", draftwood="off"), ("", False, 0), ""),
        (arrival("a", draftwood_strategy="none"), ("", False, 0), ""),
        (arrival("a", draftwood_max_nodes=3), ("default", True, 3), ""),
        (arrival("a", draftwood_max_nodes="many"), ("", False, 0), "draftwood_max_nodes"),
        (arrival("a", draftwood_strategy="unknown"), ("", False, 0), "drafting.strategy: 'unknown'"),
        (arrival("embeddings", None), ("", False, 0), ""),
    ],
)
def test_what_a_request_says_of_its_drafts(
    arrived: Arrival, expected: tuple[str, bool, int], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As on the host: `tests/memory/engines`. What cannot be read is logged once."""
    tenant, learns, nodes = expected
    with opened() as memory:
        decision = memory.join(arrived)
        memory.join(arrived._replace(request_id="b"))
    assert (decision.learns, decision.nodes) == (learns, nodes)
    assert decision.region.endswith(f":{tenant}:") if tenant else decision.region == ""
    lines = [record.getMessage() for record in caplog.records if record.name == "draftwood"]
    assert [line.startswith(f"requests are not drafted for: {problem}") for line in lines] == [True] * bool(problem)


def test_an_answer_is_learned_when_it_ends() -> None:
    stepped: list[Sequence[Session]] = []
    with opened(on_drafts=stepped.append) as memory:
        memory.join(arrival("a"))
        write(memory, {"a": ANSWER[:1]}, drafted=4)
        write(memory, {"a": ANSWER[1:4], "unknown": [7]}, drafted=2)
        write(memory, {"a": ANSWER[4:]})
        assert learned(memory) == []
        end(memory, "a")
        assert (learned(memory), len(memory)) == ([ANSWER], 0)
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
        end(memory, "a")
        assert learned(memory) == [kept]


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
        end(memory, "a")
        assert learned(memory) == []
        memory.join(arrival("a"))  # the id is used again
        under_way = False
        wait_for(lambda: learned(memory) == [ANSWER], "the answer")


def test_a_request_that_was_preempted_goes_on() -> None:
    with opened() as memory:
        first = memory.join(arrival("a"))
        write(memory, {"a": ANSWER[:2]})
        write(memory, {"a": [77]})  # dropped, as it was scheduled ahead
        memory.preempt("a")
        assert memory.join(arrival("a"), np.array(ANSWER[:2], np.int32)) == first
        write(memory, {"a": ANSWER[2:]})
        end(memory, "a")
        assert learned(memory) == [ANSWER]


def test_another_replicas_answers_are_loaded_beside_the_text_of_a_request_that_runs(server: Valkey) -> None:
    """The region is not emptied for them, and its own answer is not loaded a second time."""
    with opened(server.url) as memory:
        answered(memory, "a")
        wait_until_stored(memory)
    with opened(server.url) as memory:
        region = memory.join(arrival("b")).region
        write(memory, {"b": [21, 22, 23]})
        [load] = applied(memory, Load)
        assert isinstance(load, Load)
        assert (load.region, [run.tolist() for run in load.runs]) == (region, [ANSWER])
        end(memory, "b")
        assert learned(memory) == [ANSWER, [21, 22, 23]]
        assert memory.changes() == []


def test_a_purge_empties_the_region_and_mutes_its_requests(server: Valkey) -> None:
    with opened(server.url) as memory:
        answered(memory, "done")
        region = memory.join(arrival("running")).region
        memory.join(arrival("of another tenant", draftwood_tenant="other"))
        wait_until_stored(memory)
        memory.changes()
        memory.memory.submit(PurgeMemory("default")).result(60)
        assert Purge(region, ["running"]) in applied(memory, Purge)
        memory.preempt("running")
        assert memory.join(arrival("running")).learns is False
        assert memory.join(arrival("new")).learns is True
        write(memory, {"running": [21, 22]})
        end(memory, "running")
        assert learned(memory) == []


def test_a_region_makes_room_for_another_one_and_is_loaded_again() -> None:
    def loaded() -> tuple[list[Purge], list[tuple[str, list[list[int]]]]]:
        changes = applied(memory, Load)
        loads = [(one.region, [run.tolist() for run in one.runs]) for one in changes if isinstance(one, Load)]
        return [one for one in changes if isinstance(one, Purge)], loads

    with opened(regions=1) as memory:
        first = memory.join(arrival("a", draftwood_tenant="first")).region
        second = memory.join(arrival("b", draftwood_tenant="second"))
        assert second == Decision("", False, 48)  # the region is in use
        write(memory, {"a": ANSWER, "b": ANSWER[::-1]})
        end(memory, "a", "b")
        assert (learned(memory, "first"), learned(memory, "second")) == ([ANSWER], [ANSWER[::-1]])
        second = memory.join(arrival("c", draftwood_tenant="second"))
        assert second.region != first
        purged, loads = loaded()
        assert Purge(first, []) in purged
        assert loads == [(second.region, [ANSWER[::-1]])]
        memory.end("c")
        assert memory.join(arrival("d", draftwood_tenant="first")).region == first
        assert loaded()[1] == [(first, [ANSWER])]


def test_large_memories_are_loaded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood_vllm.device_memory._LOAD_TOKENS", 10)
    with opened() as memory:
        region = memory.join(arrival("a")).region
        memory.changes()
        for start in range(0, 40, 8):
            memory._changes.put((region, np.arange(start, start + 8, dtype=np.int32)))
        pieces = [memory.changes() for _ in range(4)]
        assert [[len(one.runs) for one in piece if isinstance(one, Load)] for piece in pieces] == [[2], [2], [1], []]


def test_metrics_are_those_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood_vllm.device_memory._PUBLISH_SECONDS", 0.0)
    published: list[list[DataPoint]] = []

    def latest() -> dict[str, float]:
        return {metric.name: value for metric, _, value in published[-1]} if published else {}

    with opened(publish=published.append) as memory:
        memory.join(arrival("a"))
        write(memory, {"a": ANSWER})
        wait_for(lambda: latest().get("draftwood_output_tokens") == len(ANSWER), "its tokens while it runs")
        end(memory, "a")
        wait_for(lambda: latest()["draftwood_memory_learned"] == 1, "its end")
        assert (latest()["draftwood_output_tokens"], latest()["draftwood_drafting_up"]) == (len(ANSWER), 1.0)
