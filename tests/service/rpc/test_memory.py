"""MemoryService, its client and `draftwood memory`, over a service with a store; and the isolation of tenants."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from draftwood.v1 import generation_pb2 as generation
from draftwood.v1 import memory_pb2 as pb
from draftwood.v1 import memory_pb2_grpc as pb_grpc
from draftwood_client import InvalidRequestError, MemoryClient, MemoryRecord, NotFoundError, UnavailableError
from draftwood_client.cli import build_app
from draftwood_memory import MemoryOverrides
from draftwood_memory.memory import Memory, StrategyUse
from draftwood_memory.operations import GetStatistics
from draftwood_memory.resident import StrategyKey
from draftwood_memory.store import purges
from draftwood_memory.store.naming import MemoryName
from draftwood_service.rpc.memory import _PAUSE, MemoryTurn
from draftwood_strategies import Strategy
from tests.memory.helpers import agreed, fill, learn_output, learned_by, log_of, numbers, replicas, strategy_of
from tests.memory.servers import Valkey
from tests.service.fakes import Served, serving, until

together = pytest.mark.asyncio(loop_scope="module")
"""Tests on a server of this file."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Served]:
    async with serving() as served:
        yield served


class OffLoop:
    """A client whose calls leave the event loop to the server."""

    def __init__(self, client: MemoryClient) -> None:
        self._client = client

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        return partial(asyncio.to_thread, getattr(self._client, method))

    async def export(self, **options: Any) -> tuple[list[MemoryRecord], str]:
        """A memory's records and their fingerprint."""

        def export() -> tuple[list[MemoryRecord], str]:
            found = self._client.export(**options)
            return list(found.records), found.fingerprint

        return await asyncio.to_thread(export)


@asynccontextmanager
async def client_of(served: Served, **options: Any) -> AsyncIterator[OffLoop]:
    client = MemoryClient(served.server.address, timeout=60, **options)
    try:
        yield OffLoop(client)
    finally:
        client.close()


async def ask(served: Served, tenant: str, tokens: int = 12) -> None:
    request = generation.GenerateRequest(text="x", tenant=tenant, drafting=generation.DraftOptions(strategy="trie"))
    request.stop.max_tokens = tokens
    assert (await served.answer(request)).finished


async def test_work_on_a_tenants_memory_is_done_one_piece_at_a_time(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that many loops of one tenant over its memory leave engine and service to the others."""
    bridge, free = served.server.bridge, asyncio.Event()
    run, running, most = bridge.run_operation, Counter[str](), Counter[str]()

    async def watched(operation: Any) -> Any:
        tenant: Any = operation.tenant if isinstance(operation, GetStatistics) else operation.name.tenant
        running[tenant] += 1
        most[tenant] = max(most[tenant], running[tenant])
        try:
            if tenant == "a":
                await free.wait()
            return await run(operation)
        finally:
            running[tenant] -= 1

    stub = pb_grpc.MemoryServiceStub(served.channel)
    record = pb.MemoryRecord(text="abc")

    async def use(tenant: str) -> None:
        async for _ in stub.ImportMemory(iter([pb.ImportMemoryRequest(tenant=tenant, records=[record])])):
            pass
        async for _ in stub.WarmMemory(iter([pb.WarmMemoryRequest(tenant=tenant, texts=["abc"])])):
            pass
        async for _ in stub.ExportMemory(pb.ExportMemoryRequest(tenant=tenant)):
            pass
        await stub.GetMemoryStatistics(pb.GetMemoryStatisticsRequest(tenant=tenant))

    with monkeypatch.context() as watching:
        watching.setattr(bridge, "run_operation", watched)
        many = [asyncio.create_task(use("a")) for _ in range(8)]
        await until(lambda: running["a"] == 1)
        await use("b")  # others do not wait for it
        assert running["a"] == 1
        free.set()
        await asyncio.gather(*many)
    assert most == {"a": 1, "b": 1}


async def test_a_pause_comes_before_work_that_waits() -> None:
    turn = MemoryTurn()

    async def work() -> None:
        async with turn.taken():
            await asyncio.sleep(0.05)

    began = time.perf_counter()
    await asyncio.gather(work(), work(), work())
    assert time.perf_counter() - began > 3 * 0.05 + 2 * _PAUSE * 0.05
    await asyncio.sleep(0)
    assert not turn._lock.locked()  # none follows what is done last


@pytest.mark.parametrize("with_redis", [False, True])
async def test_from_warming_to_purging(server: Valkey, with_redis: bool) -> None:
    async with serving(store=server.url if with_redis else "memory") as served, client_of(served) as client:
        progress: list[tuple[int, int]] = []
        texts = ["first document", "second", ""] + ["x" * 10_000] * 8
        tokens = await client.warm(texts, tenant="a", progress=lambda count, sum_: progress.append((count, sum_)))
        assert tokens == sum(map(len, texts))
        assert progress[-1] == (len(texts), tokens)
        assert len(progress) > 2
        assert progress == sorted(progress)

        found = await client.statistics()
        [memory] = found.tenants
        assert (memory.tenant, memory.arm, memory.tokens, memory.HasField("purge_time")) == ("a", "", tokens, False)
        assert memory.stored_bytes > 0
        assert found.store.healthy
        assert found.fingerprint == "f" * 16
        for call in (client.statistics("unknown"), client.export(tenant="unknown"), client.purge("unknown")):
            with pytest.raises(NotFoundError, match="tenants/unknown: has no memory"):
                await call
        assert (await client.statistics("default")).tenants == []
        with pytest.raises(NotFoundError, match="tenants/a/arms/x/y: does not exist"):
            await client.export(tenant="a", arm="x/y")

        records, fingerprint = await client.export(tenant="a")
        assert [record.text for record in records][:2] == ["first document", "second"]
        assert {record.kind for record in records} == {"corpus"}
        assert records[0].token_ids == tuple(b"first document")
        assert await client.import_records(records, fingerprint=fingerprint, tenant="b") == tokens
        again, _ = await client.export(tenant="b", text=False)
        assert [one.token_ids for one in again] == [one.token_ids for one in records]

        assert await client.purge("a") == pb.PurgeMemoryResponse(memories=1, tokens=tokens)
        assert [tenant.tenant for tenant in (await client.statistics()).tenants] == ["b"]
        assert (await client.export(tenant="a"))[0] == []


async def test_a_purge_is_final_on_the_other_server_when_the_call_returns(
    server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(store=server.url) as first, serving(store=server.url) as second, client_of(first) as client:
        for _ in range(2):
            await ask(second, "t")
            await ask(first, "t")
            await until(lambda: len(log_of(second.memory, "t")) == 2 == len(log_of(first.memory, "t")))
            purged = await client.purge("t")
            assert (purged.tokens, purged.HasField("final_time")) == (24, False)
            assert [learned_by(one.memory, "t") for one in (first, second)] == [[], []]
        process = purges.Purges(second.memory.memories.client, "0" * 16)  # type: ignore[union-attr]
        for _ in range(2):
            seen, _tenants = await asyncio.wrap_future(second.memory.thread.submit(process.missed()))
            process.applied(seen)  # and is killed once the store has noted it
        monkeypatch.setattr(purges, "_SILENT_SECONDS", 2.5)
        purged = await client.purge("t")
        assert 0 < purged.final_time.ToNanoseconds() / 1e9 - time.time() < purges.LEASE_SECONDS


async def test_an_import_from_another_model_learns_the_texts(served: Served) -> None:
    async with client_of(served, tenant="t") as client:
        record = MemoryRecord((1, 2, 999_999), "hello", "output")
        assert await client.import_records([record], fingerprint="0" * 16) == 5
        [back], _ = await client.export()
        assert back == MemoryRecord(tuple(b"hello"), "hello", "output")
        with pytest.raises(InvalidRequestError, match=r"records\[0\].text"):
            await client.import_records([MemoryRecord((1,))], fingerprint="0" * 16)
        with pytest.raises(InvalidRequestError, match=r"records\[0\].tokens.ids\[2\]"):
            await client.import_records([record], fingerprint="f" * 16)
        with pytest.raises(InvalidRequestError, match="tenant"):
            await client.warm(["x"], tenant="a\nb")
        await client.warm(["for all"], tenant="default")
        assert (await client.purge("")).tokens == len("for all")  # an empty tenant is "default" everywhere


async def test_without_a_store_operators_get_an_error_and_requests_are_served() -> None:
    with Valkey() as store:
        async with serving(store=store.url, store_timeout=0.5) as served, client_of(served) as client:
            store.kill()
            await ask(served, "t")
            for work in (client.warm(["x"]), client.purge("t"), client.statistics("elsewhere")):
                with pytest.raises(UnavailableError, match=r"^the server runs, but the store of its memories"):
                    await work
            await ask(served, "t")
            statistics = await client.statistics()
            assert not statistics.store.healthy
            assert statistics.store.outbox_records == served.memory.outbox.pending >= 1
            assert [shown.tenant for shown in statistics.tenants] == ["t"]


def _knows(memory: Memory, tenant: str, tokens: int) -> bool:
    return [len(sequence) for sequence in learned_by(memory, tenant)] == [tokens]


async def test_tenants_see_nothing_of_one_another(server: Valkey) -> None:
    """Sequences of one tenant appear in no other's drafts, statistics or exports, whatever their names."""
    nasty = dict(zip(["a", "a.b", "a~", "0", "x" * 128, "a-b", "a_b", "A"], b"ABCDEFGH", strict=True))
    async with serving(store=server.url) as served, client_of(served) as client:
        memory, prefix = served.memory, [*b"shared prefix "]
        for tenant, secret in nasty.items():
            await client.warm([bytes([*prefix, *[secret] * 20]).decode()], tenant=tenant)
        for tenant, secret in nasty.items():
            await until(lambda tenant=tenant: len(log_of(memory, tenant)) == 1)  # type: ignore[misc]
            await strategy_of(memory, tenant)
            await until(partial(_knows, memory, tenant, len(prefix) + 20))
            strategy: Any = await strategy_of(memory, tenant)
            drafter = strategy.start(np.array(prefix, np.int32))
            drafted = set(drafter.propose(64).tokens.tolist())
            drafter.close()
            assert drafted & {*nasty.values()} == {secret}
            statistics = await client.statistics(tenant)
            assert [one.tenant for one in statistics.tenants] == [tenant]
            [record], _ = await client.export(tenant=tenant)
            assert set(record.token_ids) - set(prefix) == {secret}
        assert (await client.purge("a")).tokens == len(prefix) + 20
        assert {one.tenant for one in (await client.statistics()).tenants} == set(nasty) - {"a"}


async def test_admission_reveals_nothing_of_other_tenants(server: Valkey) -> None:
    """A tenant's first request here begins at the same time whether or not the store has its memory."""
    async with serving(store=server.url) as first, serving(store=server.url, memory_preload=0) as second:
        async with client_of(first) as client:
            await client.warm(["y" * 5000] * 10, tenant="known")
        memory = second.memory
        await until(lambda: memory.thread.healthy)
        server.pause()
        try:
            delivered: list[Strategy] = []
            uses = [
                StrategyUse(MemoryName(one), StrategyKey("trie"), MemoryOverrides()) for one in ("known", "stranger")
            ]
            waits = [memory.fetch(use, delivered.append) is None for use in uses]
            assert waits[0] == waits[1]
            await until(lambda: len(delivered) == sum(waits))
            assert [getattr(strategy, "tokens", None) for strategy in delivered] == [0] * len(delivered)
        finally:
            server.resume()
        await until(lambda: len(learned_by(memory, "known")) == 10)
        assert learned_by(memory, "stranger") == []


async def run(served: Served, line: str, *options: str, stdin: bytes | None = None) -> Result:
    """`draftwood memory`."""
    command, *arguments = line.split()
    given = ["memory", command, "--target", served.server.address, *arguments, *options]
    return await asyncio.to_thread(CliRunner().invoke, build_app(), given, input=stdin, catch_exceptions=False)


async def test_the_command_line(server: Valkey, tmp_path: Path) -> None:
    corpus, lines, out = tmp_path / "corpus.txt", tmp_path / "lines.jsonl", tmp_path / "out.jsonl"
    corpus.write_text("one line\nanother line\n")
    lines.write_text('{"text": "from json"}\n\n{"answer": "and more"}\n')
    async with serving(store=server.url) as served:
        warmed = await run(served, "warm --tenant t", str(corpus), str(lines))
        assert (warmed.exit_code, warmed.stdout) == (0, "38 tokens\n")
        shown = await run(served, "stats --tenant t")
        assert shown.stdout.splitlines()[1].split()[:3] == ["t", "-", "38"]
        assert re.search(r" (KiB|B)\b", shown.stdout)
        assert re.search(r"last lag +[\d,]+ ms\n", shown.stdout)
        assert json.loads((await run(served, "stats --tenant t --json")).stdout)["tenants"][0]["tokens"] == 38
        assert (await run(served, "export --tenant t", str(out))).exit_code == 0
        head, *records = [json.loads(line) for line in out.read_text().splitlines()]
        assert head == {"draftwood_memory": 1, "model": "fake", "fingerprint": "f" * 16}
        assert [record["text"] for record in records] == ["one line\nanother line", "from json", "and more"]
        assert (await run(served, "purge --tenant t --yes")).stdout == "38 tokens forgotten\n"
        assert (await run(served, "import --tenant t", str(out))).stdout == "38 tokens\n"
        assert (await run(served, "export --tenant t")).stdout == out.read_text()
        for command, file, problem in (
            ("export", tmp_path / "no" / "file", "cannot be written: No such file or directory"),
            ("warm", tmp_path / "none", "cannot be read"),
        ):
            wrong = await run(served, f"{command} --tenant t", str(file))
            assert (wrong.exit_code, problem in wrong.stderr) == (2, True)
        for command, files in (("purge --yes", []), ("warm", [str(corpus)]), ("import", [str(out)])):
            nobody = await run(served, command, *files)
            assert (nobody.exit_code, nobody.stderr) == (2, "error: --tenant: must be given\n")
        unknown = await run(served, "stats --tenant typo")
        assert (unknown.exit_code, unknown.stderr) == (1, "error: tenants/typo: has no memory and no configuration\n")


async def run_on(served: Served, folder: Path, line: str, content: str) -> Result:
    """Runs a command with a file of the folder, or with stdin, for a tenant with the folder's name."""
    command, name, *options = line.split()
    data, given = content.encode("utf-8", "surrogateescape"), name
    if name != "-":
        (folder / name).write_bytes(data)
        given = str(folder / name)
    return await run(served, command, given, "--tenant", folder.name, *options, stdin=data)


BOM, RECORDS = "\ufeff", '{"draftwood_memory": 1, "fingerprint": "' + "f" * 16 + '"}\n'
JSON_TEXT, HALF = '{"text": "from json"}\r\n', r"\ud800"


@pytest.mark.parametrize(
    ("line", "content", "learned"),
    [
        ("warm x.JSONL", BOM + JSON_TEXT, ["from json"]),
        ("warm x.NdJson", "\n" + JSON_TEXT, ["from json"]),
        ("warm -", JSON_TEXT * 2, ["from json"] * 2),
        ("warm x", BOM + JSON_TEXT, ["from json"]),
        ("warm - --format text", JSON_TEXT, [JSON_TEXT.strip()]),
        ("warm x.txt", BOM + "a\r\nb\r\n", ["a\nb"]),
        ("warm -", '{"level": "info"}\n', ['{"level": "info"}']),  # JSON, and no text that is a line's
        ("import -", BOM + RECORDS + '{"token_ids": [65, 66]}\r\n', ["AB"]),
    ],
)
@together
async def test_the_format_of_a_file_is_found(
    shared: Served, tmp_path: Path, line: str, content: str, learned: list[str]
) -> None:
    ran = await run_on(shared, tmp_path, line, content)
    assert (ran.exit_code, ran.stderr) == (0, "")
    async with client_of(shared) as client:
        assert [record.text for record in (await client.export(tenant=tmp_path.name))[0]] == learned


RANGE = "99999999999 is not allowed; it must lie in [0, 2147483647]"


@pytest.mark.parametrize(
    ("line", "content", "error"),
    [
        ("warm x.jsonl", f'{JSON_TEXT}{{"text": "ab{HALF}"}}', "line 2: text: character 2 is the unpaired"),
        ("warm x.jsonl", "[" * 100_000, "line 1: nested too deeply"),
        ("warm x.jsonl", JSON_TEXT + "7", "line 2: must be a JSON object, not int"),
        ("warm x.jsonl", RECORDS, "none of text"),
        ("warm - --format jsonl", "plain", "-, line 1: not JSON"),
        ("warm x.txt", "a\n\udcff", "line 2: byte 0 of the line is 255, which is not UTF-8"),
        ("import x", JSON_TEXT, "line 1: must be the header of an exported memory of format 1"),
        ("import x", RECORDS + '\n{"token_ids": [1, 99999999999]}', f"line 3: token_ids[1]: {RANGE}"),
        ("import x", RECORDS + '{"token_ids": [true]}', "line 2: token_ids[0]: must be an int, not bool"),
        ("import x", RECORDS + '{"token_ids": 7}', "line 2: token_ids: must be a sequence of token ids, not int"),
        ("import x", RECORDS + f'{{"text": "{HALF}"}}', "line 2: text: character 0 is the unpaired surrogate"),
        ("import x", f'{{"draftwood_memory": 1, "fingerprint": "{HALF}"}}', "line 1: fingerprint: character 0 is"),
        ("import x", '{"draftwood_memory": 1, "fingerprint": 7}', "line 1: fingerprint: must be a str, not int"),
    ],
)
@together
async def test_a_line_that_is_wrong_is_named(
    shared: Served, tmp_path: Path, line: str, content: str, error: str
) -> None:
    ran = await run_on(shared, tmp_path, line, content)
    assert ran.exit_code == 2
    [said] = ran.stderr.splitlines()
    assert error in said
    assert "-" in line.split() or f"{tmp_path}/{line.split()[1]}" in said


ANY_LINE = st.binary(max_size=20) | st.dictionaries(
    st.sampled_from(["text", "answer", "token_ids", "kind", "draftwood_memory", "fingerprint"]),
    st.text(st.characters(exclude_categories=()), max_size=5)
    | st.lists(st.integers() | st.floats(), max_size=3)
    | st.just(1),
).map(lambda value: json.dumps(value).encode())


@given(
    command=st.sampled_from(["warm x", "warm x.jsonl", "import x", "import -"]), lines=st.lists(ANY_LINE, max_size=4)
)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@together
async def test_no_file_ends_in_a_traceback(shared: Served, tmp_path: Path, command: str, lines: list[bytes]) -> None:
    head = RECORDS.encode() if command.startswith("import") else b""
    text = (head + b"\n".join(lines)).decode("utf-8", "surrogateescape")
    ran = await run_on(shared, tmp_path, command, text)
    assert ran.exit_code in (0, 1, 2)
    assert len(ran.stderr.splitlines()) == (ran.exit_code > 0)
    assert "internal" not in ran.stderr


@together
async def test_the_client_names_what_cannot_be_encoded(shared: Served) -> None:
    async with client_of(shared) as client:
        with pytest.raises(ValueError, match=r"texts\[1\]: character 1 is the unpaired surrogate"):
            await client.warm(["a", "b\ud800"], tenant="unencodable")
        for record, problem in (
            (MemoryRecord((1, 2**31)), r"records\[0\].token_ids\[1\]: 2147483648 is not allowed"),
            (MemoryRecord((), "\udfff"), r"records\[0\].text: character 0 is the unpaired surrogate"),
        ):
            with pytest.raises(ValueError, match=problem):
                await client.import_records([record], fingerprint="f" * 16, tenant="unencodable")


async def test_statistics_come_in_pages() -> None:
    async with serving() as served, client_of(served) as client:
        for number in range(5):
            await client.warm(["text"], tenant=f"t{number}")
        read: Any = pb_grpc.MemoryServiceStub(served.channel).GetMemoryStatistics
        pages: list[list[str]] = []
        token = ""
        while not pages or token:
            page = await read(pb.GetMemoryStatisticsRequest(page_size=2, page_token=token))
            pages.append([tenant.tenant for tenant in page.tenants])
            token = page.next_page_token
        assert pages == [["t4", "t3"], ["t2", "t1"], ["t0"]]
        assert not (await read(pb.GetMemoryStatisticsRequest(tenant=""))).tenants
        for wrong, field in (({"page_size": -1}, "page_size"), ({"page_token": "x"}, "page_token")):
            with pytest.raises(grpc.aio.AioRpcError, match=field):
                await read(pb.GetMemoryStatisticsRequest(**wrong))


async def test_pages_of_an_export_fit_what_clients_receive() -> None:
    """Whatever the records: many short ones, or long ones whose text is long."""
    async with serving(memory_bytes=32 << 20) as served, client_of(served) as client:
        served.model.tokenizer.decode = lambda *_, **__: "\U0001f600" * 900_000  # type: ignore[method-assign]
        await client.warm(["x" * 8192 * 3])
        for number in range(30):
            await client.warm([f"text {number}"])
        export: Any = pb_grpc.MemoryServiceStub(served.channel).ExportMemory(pb.ExportMemoryRequest())
        messages = [message async for message in export]
        assert max(message.ByteSize() for message in messages) < 4 << 20
        assert sum(len(message.records) for message in messages) == 33


async def test_memory_streams_whose_client_stalls_are_ended() -> None:
    async with serving(stall_timeout=0.3) as served:
        served.model.tokenizer.decode = lambda *_, **__: "x" * 1_000_000  # type: ignore[method-assign]
        # Over a call it would have to be quick, too.
        await served.server.bridge.run_operation(fill("default", *[b"x" * 8192] * 50))
        stub: Any = pb_grpc.MemoryServiceStub(served.channel)
        export = aiter(stub.ExportMemory(pb.ExportMemoryRequest()))
        await anext(export)
        assert await served.server.bridge.wait_idle(60.0)  # reads nothing
        with pytest.raises(grpc.aio.AioRpcError, match="read or sent nothing"):
            [message async for message in export]
        for method, make in ((stub.WarmMemory, pb.WarmMemoryRequest), (stub.ImportMemory, pb.ImportMemoryRequest)):
            stream = method()
            await stream.write(make(tenant="t"))
            await stream.read()
            assert await asyncio.wait_for(stream.code(), 10.0) is grpc.StatusCode.ABORTED  # sends nothing more
        assert served.memory.residents.open(MemoryName("t")).pins == 0


async def test_what_is_done_to_a_memory_leaves_an_audit_line(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as served, client_of(served, tenant="acme") as client:
        record = MemoryRecord(tuple(b"secret text"), "secret text")
        await client.import_records([record], fingerprint="f" * 16)
        await client.export()
        await client.purge("acme")
        await client.purge_orphans()
        with pytest.raises(InvalidRequestError):
            await client.import_records([MemoryRecord((999,))], fingerprint="f" * 16)
        await client.warm(["secret", "texts"])
    lines: list[Any] = [one.msg for one in caplog.records if one.name == "draftwood.audit"]
    assert [(one["action"], one["tenant"], one["result"]) for one in lines] == [
        ("import", "acme", "ok"),
        ("export", "acme", "ok"),
        ("purge", "acme", "ok"),
        ("purge orphans", None, "ok"),
        ("import", "acme", "invalid_value"),
        ("warm", "acme", "ok"),
    ]
    assert [one.get("records") for one in lines] == [1, 1, None, None, 0, 2]
    assert {(one["principal"], one["role"]) for one in lines} == {("anyone", "operator")}
    assert (lines[2]["memories"], lines[2]["tokens"]) == (1, 11)
    for line in lines:
        assert line["peer"].startswith("ipv4:127.0.0.1")
        assert line["timestamp"]
        assert "secret" not in str(line)


async def test_orphans_through_the_client(server: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood_memory.operations.ORPHANED_SECONDS", 0.0)
    async with replicas(1, server.url, fingerprint="e" * 16) as [old]:
        await learn_output(old, "acme", numbers(11))
        await agreed([old], "acme")
    async with serving(store=server.url) as served, client_of(served) as client:
        [found] = await client.orphans()
        assert (found.tenant, found.fingerprint, found.tokens) == ("acme", "e" * 16, 11)
        assert "acme" in (await run(served, "orphans")).stdout
        assert (await run(served, "orphans --purge --yes")).stdout == "11 tokens forgotten\n"
        assert await client.orphans() == []
