"""MemoryService, its client and `draftwood memory`, over a service with a store; and the isolation of tenants."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
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
from draftwood_service.rpc.memory import MemoryTurn
from draftwood_strategies import Strategy
from tests.memory.helpers import agreed, learn_output, learned_by, log_of, numbers, replicas, strategy_of
from tests.memory.servers import Valkey
from tests.service.fakes import FakeModel, Served, answer, serving, until

together = pytest.mark.asyncio(loop_scope="module")
"""Tests on a server of this file."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Served]:
    async with serving() as served:
        yield served


@asynccontextmanager
async def client_of(served: Served, **options: Any) -> AsyncIterator[MemoryClient]:
    client = MemoryClient(served.server.address, timeout=10, **options)
    try:
        yield client
    finally:
        client.close()


async def export_of(client: MemoryClient, **options: Any) -> tuple[list[MemoryRecord], str]:
    """A memory's records and their fingerprint; off the event loop, which runs the server."""

    def export() -> tuple[list[MemoryRecord], str]:
        found = client.export(**options)
        return list(found.records), found.fingerprint

    return await asyncio.to_thread(export)


async def ask(served: Served, tenant: str, tokens: int = 12) -> None:
    request = generation.GenerateRequest(text="x", tenant=tenant, drafting=generation.DraftOptions(strategy="trie"))
    request.stop.max_tokens = tokens
    assert (await answer(served.stub.GenerateStream(request))).finished


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


async def test_a_pause_comes_before_work_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    turn, pauses = MemoryTurn(), list[float]()
    loop = asyncio.get_running_loop()
    later = loop.call_later

    def note(pause: float, *call: Any) -> None:
        pauses.append(pause)
        later(pause, *call)

    monkeypatch.setattr(loop, "call_later", note)

    async def work() -> None:
        async with turn.taken():
            await asyncio.sleep(0)

    await work()
    assert pauses == [0.0]
    await asyncio.gather(work(), work(), work())
    assert [pause > 0 for pause in pauses] == [False, True, True, False]


@pytest.mark.parametrize("with_redis", [False, True])
async def test_from_warming_to_purging(server: Valkey, with_redis: bool) -> None:
    async with serving(store=server.url if with_redis else "memory") as served, client_of(served) as client:
        progress: list[tuple[int, int]] = []
        texts = ["first document", "second", ""] + ["x" * 10_000] * 8
        tokens = await asyncio.to_thread(
            client.warm, texts, tenant="a", progress=lambda count, sum_: progress.append((count, sum_))
        )
        assert tokens == sum(map(len, texts))
        assert progress[-1] == (len(texts), tokens)
        assert len(progress) > 2
        assert progress == sorted(progress)

        found = await asyncio.to_thread(client.statistics)
        [memory] = found.tenants
        assert (memory.tenant, memory.arm, memory.tokens, memory.HasField("purge_time")) == ("a", "", tokens, False)
        assert memory.stored_bytes > 0
        assert found.store.healthy
        assert found.fingerprint == "f" * 16
        calls: list[Callable[[], object]] = [
            lambda: client.statistics("unknown"),
            lambda: client.export(tenant="unknown"),
            lambda: client.purge("unknown"),
        ]
        for call in calls:
            with pytest.raises(NotFoundError, match="tenants/unknown: has no memory"):
                await asyncio.to_thread(call)
        assert (await asyncio.to_thread(client.statistics, "default")).tenants == []

        with pytest.raises(NotFoundError, match="tenants/a/arms/x/y: does not exist"):
            await export_of(client, tenant="a", arm="x/y")
        records, fingerprint = await export_of(client, tenant="a")
        assert [record.text for record in records][:2] == ["first document", "second"]
        assert {record.kind for record in records} == {"corpus"}
        assert records[0].token_ids == tuple(b"first document")

        copied = await asyncio.to_thread(client.import_records, records, fingerprint=fingerprint, tenant="b")
        assert copied == tokens
        again, _ = await export_of(client, tenant="b", text=False)
        assert [one.token_ids for one in again] == [one.token_ids for one in records]

        assert await asyncio.to_thread(client.purge, "a") == pb.PurgeMemoryResponse(memories=1, tokens=tokens)
        assert [tenant.tenant for tenant in (await asyncio.to_thread(client.statistics)).tenants] == ["b"]
        assert (await export_of(client, tenant="a"))[0] == []


async def test_a_purge_is_final_on_the_other_server_when_the_call_returns(
    server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(store=server.url) as first, serving(store=server.url) as second, client_of(first) as client:
        for _ in range(2):
            await ask(second, "t")
            await ask(first, "t")
            await until(lambda: len(log_of(second.memory, "t")) == 2 == len(log_of(first.memory, "t")))
            purged = await asyncio.to_thread(client.purge, "t")
            assert (purged.tokens, purged.HasField("final_time")) == (24, False)
            assert [learned_by(one.memory, "t") for one in (first, second)] == [[], []]
        process = purges.Purges(second.memory.memories.client, "0" * 16)  # type: ignore[union-attr]
        for _ in range(2):
            seen, _tenants = await asyncio.wrap_future(second.memory.thread.submit(process.missed()))
            process.applied(seen)  # and is killed once the store has noted it
        monkeypatch.setattr(purges, "_SILENT_SECONDS", 2.5)
        purged = await asyncio.to_thread(client.purge, "t")
        assert 0 < purged.final_time.ToNanoseconds() / 1e9 - time.time() < purges.LEASE_SECONDS


async def test_an_import_from_another_model_learns_the_texts() -> None:
    async with serving() as served, client_of(served, tenant="t") as client:
        record = MemoryRecord((1, 2, 999_999), "hello", "output")
        assert await asyncio.to_thread(client.import_records, [record], fingerprint="0" * 16) == 5
        [back], _ = await export_of(client)
        assert back == MemoryRecord(tuple(b"hello"), "hello", "output")
        with pytest.raises(InvalidRequestError, match=r"records\[0\].text"):
            await asyncio.to_thread(client.import_records, [MemoryRecord((1,))], fingerprint="0" * 16)
        with pytest.raises(InvalidRequestError, match=r"records\[0\].tokens.ids\[2\]"):
            await asyncio.to_thread(client.import_records, [record], fingerprint="f" * 16)
        await asyncio.to_thread(client.warm, ["for all"], tenant="default")
        assert (await asyncio.to_thread(client.purge, "")).tokens == len(
            "for all"
        )  # an empty tenant is "default" everywhere
        with pytest.raises(InvalidRequestError, match="tenant"):
            await asyncio.to_thread(client.warm, ["x"], tenant="a\nb")


async def test_without_a_store_operators_get_an_error_and_requests_are_served() -> None:
    with Valkey() as store:
        async with serving(store=store.url, store_timeout=0.5) as served, client_of(served) as client:
            store.kill()
            await ask(served, "t")
            unknown = partial(client.statistics, "elsewhere")
            for work in (lambda: client.warm(["x"]), lambda: client.purge("t"), unknown):
                with pytest.raises(UnavailableError, match=r"^the server runs, but the store of its memories"):
                    await asyncio.to_thread(work)
            await ask(served, "t")
            assert served.memory.outbox.pending >= 1
            statistics = await asyncio.to_thread(client.statistics)
            assert (statistics.store.healthy, statistics.store.outbox_records) == (False, served.memory.outbox.pending)
            assert [shown.tenant for shown in statistics.tenants] == ["t"]


async def test_a_malformed_message_is_named(served: Served) -> None:
    method: Any = served.channel.stream_stream("/draftwood.v1.MemoryService/WarmMemory")
    call = method(iter([b"\x0a\xff\xff"]))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        [one async for one in call]
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def _holds_one(memory: Memory, tenant: str) -> bool:
    return len(log_of(memory, tenant)) == 1


def _knows(memory: Memory, tenant: str, tokens: int) -> bool:
    return [len(sequence) for sequence in learned_by(memory, tenant)] == [tokens]


async def test_tenants_see_nothing_of_one_another(server: Valkey) -> None:
    """Sequences of one tenant appear in no other's drafts, statistics or exports, whatever their names."""
    nasty = ["a", "a.b", "a~", "0", "x" * 128, "a-b", "a_b", "A"]
    async with serving(store=server.url) as served, client_of(served) as client:
        memory = served.memory
        prefix = [*b"shared prefix "]
        for number, tenant in enumerate(nasty):
            secret = bytes([*prefix, *[65 + number] * 20]).decode()
            await asyncio.to_thread(client.warm, [secret], tenant=tenant)
        for number, tenant in enumerate(nasty):
            await until(partial(_holds_one, memory, tenant))
            await strategy_of(memory, tenant)
            await until(partial(_knows, memory, tenant, len(prefix) + 20))
            strategy: Any = await strategy_of(memory, tenant)
            drafter = strategy.start(np.array(prefix, np.int32))
            drafted = set(drafter.propose(64).tokens.tolist())
            drafter.close()
            assert 65 + number in drafted
            assert not drafted & ({65 + other for other in range(len(nasty))} - {65 + number})
            statistics = await asyncio.to_thread(client.statistics, tenant)
            assert [one.tenant for one in statistics.tenants] == [tenant]
            [record], _ = await export_of(client, tenant=tenant)
            assert set(record.token_ids) - set(prefix) == {65 + number}
        assert (await asyncio.to_thread(client.purge, "a")).tokens == len(prefix) + 20
        assert {one.tenant for one in (await asyncio.to_thread(client.statistics)).tenants} == set(nasty) - {"a"}


async def test_admission_reveals_nothing_of_other_tenants(server: Valkey) -> None:
    """A tenant's first request here begins at the same time whether or not the store has its memory."""
    async with serving(store=server.url) as first, serving(store=server.url, memory_preload=0) as second:
        async with client_of(first) as client:
            await asyncio.to_thread(client.warm, ["y" * 5000] * 10, tenant="known")
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


def run(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), ["memory", *arguments], catch_exceptions=False)


async def test_the_command_line(server: Valkey, tmp_path: Path) -> None:
    corpus, lines, out = tmp_path / "corpus.txt", tmp_path / "lines.jsonl", tmp_path / "out.jsonl"
    corpus.write_text("one line\nanother line\n")
    lines.write_text('{"text": "from json"}\n\n{"answer": "and more"}\n')
    async with serving(store=server.url) as served:
        target = ("--target", served.server.address, "--tenant", "t")

        async def cli(*arguments: str) -> Result:
            return await asyncio.to_thread(run, arguments[0], *target, *arguments[1:])

        warmed = await cli("warm", str(corpus), str(lines))
        assert (warmed.exit_code, warmed.stdout) == (0, "38 tokens\n")
        shown = await cli("stats")
        assert shown.stdout.splitlines()[1].split()[:3] == ["t", "-", "38"]
        assert " KiB" in shown.stdout or " B" in shown.stdout
        assert re.search(r"last lag +[\d,]+ ms\n", shown.stdout)
        assert json.loads((await cli("stats", "--json")).stdout)["tenants"][0]["tokens"] == 38
        assert (await cli("export", str(out))).exit_code == 0
        head, *records = [json.loads(line) for line in out.read_text().splitlines()]
        assert head == {"draftwood_memory": 1, "model": "fake", "fingerprint": "f" * 16}
        assert [record["text"] for record in records] == ["one line\nanother line", "from json", "and more"]
        assert (await cli("purge", "--yes")).stdout == "38 tokens forgotten\n"
        assert (await cli("import", str(out))).stdout == "38 tokens\n"
        assert (await cli("export")).stdout == out.read_text()
        wrong = {"record": '{"token_ids": [true]}', "object": "[1]"}
        for name, line in wrong.items():
            (tmp_path / name).write_text(out.read_text().splitlines()[0] + "\n" + line + "\n")
        (tmp_path / "latin").write_bytes(b"\xff\n")
        for arguments, text in (
            (("import", str(tmp_path / "record")), "line 2: token_ids[0]: must be an int, not bool"),
            (("import", str(tmp_path / "object")), "line 2: must be a JSON object, not list"),
            (("import", str(tmp_path / "latin")), "latin, line 1: byte 0 of the line is 255, which is not UTF-8"),
            (("export", str(tmp_path / "no" / "file")), "cannot be written: No such file or directory"),
            (("import", str(corpus)), "not JSON"),
            (("import", str(lines)), "line 1: must be the header of an exported memory of format 1"),
            (("warm", str(out)), "none of text"),
            (("warm", str(tmp_path / "none")), "cannot be read"),
        ):
            refused = await cli(*arguments)
            assert refused.exit_code == 2
            assert text in refused.stderr
        for arguments in (("purge", "--yes"), ("warm", str(corpus)), ("import", str(out))):
            refused = await asyncio.to_thread(run, *arguments, "--target", served.server.address)
            assert (refused.exit_code, refused.stderr) == (2, "error: --tenant: must be given\n")
        unknown = await asyncio.to_thread(run, "stats", "--target", served.server.address, "--tenant", "typo")
        assert (unknown.exit_code, unknown.stderr) == (1, "error: tenants/typo: has no memory and no configuration\n")
    assert FakeModel().fingerprint == head["fingerprint"]


BOM, RECORDS = "\ufeff", '{"draftwood_memory": 1, "fingerprint": "' + "f" * 16 + '"}\n'
JSON_TEXT, HALF = '{"text": "from json"}\r\n', r"\ud800"


@pytest.mark.parametrize(
    ("arguments", "stdin", "learned"),
    [
        ("warm x.jsonl", BOM + JSON_TEXT, ["from json"]),
        ("warm x.JSONL", JSON_TEXT, ["from json"]),
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
    shared: Served, tmp_path: Path, arguments: str, stdin: str, learned: list[str]
) -> None:
    ran = await asyncio.to_thread(run_on, shared, tmp_path, arguments, stdin)
    assert (ran.exit_code, ran.stderr) == (0, "")
    async with client_of(shared) as client:
        assert [record.text for record in (await export_of(client, tenant=tmp_path.name))[0]] == learned


@pytest.mark.parametrize(
    ("arguments", "stdin", "error"),
    [
        (
            "warm x.jsonl",
            JSON_TEXT + f'{{"text": "ab{HALF}"}}',
            "x.jsonl, line 2: text: character 2 is the unpaired",
        ),
        ("warm x.jsonl", "[" * 100_000, "x.jsonl, line 1: nested too deeply"),
        ("warm x.jsonl", JSON_TEXT + "7", "x.jsonl, line 2: must be a JSON object, not int"),
        ("warm - --format jsonl", "plain", "-, line 1: not JSON"),
        ("warm x.txt", "a\n\udcff", "x.txt, line 2: byte 0 of the line is 255, which is not UTF-8"),
        (
            "import x",
            RECORDS + '\n{"token_ids": [1, 99999999999]}',
            "x, line 3: token_ids[1]: 99999999999 is not allowed; it must lie in [0, 2147483647]",
        ),
        (
            "import x",
            RECORDS + '{"token_ids": [-1]}',
            "x, line 2: token_ids[0]: -1 is not allowed; it must lie",
        ),
        ("import x", RECORDS + '{"token_ids": [1.5]}', "x, line 2: token_ids[0]: must be an int, not float"),
        ("import x", RECORDS + '{"token_ids": 7}', "x, line 2: token_ids: must be a sequence of token ids, not int"),
        ("import x", RECORDS + f'{{"text": "{HALF}"}}', "x, line 2: text: character 0 is the unpaired surrogate"),
        ("import x", f'{{"draftwood_memory": 1, "fingerprint": "{HALF}"}}', "x, line 1: fingerprint: character 0 is"),
        ("import x", '{"draftwood_memory": 1, "fingerprint": 7}', "x, line 1: fingerprint: must be a str, not int"),
    ],
)
@together
async def test_a_line_that_is_wrong_is_named(
    shared: Served, tmp_path: Path, arguments: str, stdin: str, error: str
) -> None:
    ran = await asyncio.to_thread(run_on, shared, tmp_path, arguments, stdin)
    assert ran.exit_code == 2
    [line] = ran.stderr.splitlines()
    assert f"{tmp_path}/{error}".removeprefix(f"{tmp_path}/-") in line


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
    ran = await asyncio.to_thread(run_on, shared, tmp_path, command, text)
    assert ran.exit_code in (0, 1, 2)
    assert len(ran.stderr.splitlines()) == (ran.exit_code > 0)
    assert "internal" not in ran.stderr


@together
async def test_the_client_names_what_cannot_be_encoded(shared: Served) -> None:
    async with client_of(shared) as client:
        with pytest.raises(ValueError, match=r"texts\[1\]: character 1 is the unpaired surrogate"):
            await asyncio.to_thread(client.warm, ["a", "b\ud800"], tenant="unencodable")
        for record, problem in (
            (MemoryRecord((1, 2**31)), r"records\[0\].token_ids\[1\]: 2147483648 is not allowed"),
            (MemoryRecord((), "\udfff"), r"records\[0\].text: character 0 is the unpaired surrogate"),
        ):
            with pytest.raises(ValueError, match=problem):
                await asyncio.to_thread(client.import_records, [record], fingerprint="f" * 16, tenant="unencodable")


def run_on(served: Served, folder: Path, arguments: str, stdin: str) -> Result:
    """Runs a command with a file of the folder, or with stdin, for a tenant with the folder's name."""
    command, name, *options = arguments.split()
    data, given = stdin.encode("utf-8", "surrogateescape"), name
    if name != "-":
        (folder / name).write_bytes(data)
        given = str(folder / name)
    target = ("--target", served.server.address, "--tenant", folder.name)
    line = ["memory", command, *target, given, *options]
    return CliRunner().invoke(build_app(), line, input=data, catch_exceptions=False)


async def test_statistics_come_in_pages() -> None:
    async with serving() as served, client_of(served) as client:
        for number in range(5):
            await asyncio.to_thread(client.warm, ["text"], tenant=f"t{number}")
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
        await asyncio.to_thread(client.warm, ["x" * 8192 * 3])
        for number in range(30):
            await asyncio.to_thread(client.warm, [f"text {number}"])
        export: Any = pb_grpc.MemoryServiceStub(served.channel).ExportMemory(pb.ExportMemoryRequest())
        messages = [message async for message in export]
        assert max(message.ByteSize() for message in messages) < 4 << 20
        assert sum(len(message.records) for message in messages) == 33


async def test_memory_streams_whose_client_stalls_are_ended() -> None:
    async with serving(stall_timeout=0.3) as served, client_of(served) as client:
        served.model.tokenizer.decode = lambda *_, **__: "x" * 1_000_000  # type: ignore[method-assign]
        await asyncio.to_thread(client.warm, ["x" * 8192] * 50)
        stub: Any = pb_grpc.MemoryServiceStub(served.channel)
        export = aiter(stub.ExportMemory(pb.ExportMemoryRequest()))
        await anext(export)
        await asyncio.sleep(1.0)  # reads nothing
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
        await asyncio.to_thread(client.import_records, [record], fingerprint="f" * 16)
        await export_of(client)
        await asyncio.to_thread(client.purge, "acme")
        await asyncio.to_thread(client.purge_orphans)
        with pytest.raises(InvalidRequestError):
            await asyncio.to_thread(client.import_records, [MemoryRecord((999,))], fingerprint="f" * 16)
        await asyncio.to_thread(client.warm, ["secret", "texts"])
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
        [found] = await asyncio.to_thread(client.orphans)
        assert (found.tenant, found.fingerprint, found.tokens) == ("acme", "e" * 16, 11)
        shown = await asyncio.to_thread(run, "orphans", "--target", served.server.address)
        assert "acme" in shown.stdout
        purged = await asyncio.to_thread(run, "orphans", "--purge", "--yes", "--target", served.server.address)
        assert purged.stdout == "11 tokens forgotten\n"
        assert await asyncio.to_thread(client.orphans) == []
