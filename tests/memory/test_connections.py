"""Connections to a Redis server: URLs, TLS, and the embedded server."""

from __future__ import annotations

import asyncio
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import redis

from draftwood_memory import RedisClient, RedisTls
from draftwood_memory.errors import InvalidSettingError, StoreUnavailableError
from draftwood_memory.store.embedded import EmbeddedServer, binary
from tests.certificates import make_certificate
from tests.memory.helpers import agreed, learn_output, numbers, replicas, stored, until
from tests.memory.servers import Proxy, Valkey, alive, wait_for


@pytest.mark.parametrize(
    ("url", "description"),
    [
        ("redis://h", "server h:6379"),
        ("redis://user:secret@h:7/3", "server h:7"),
        ("rediss://:secret@h", "server h:6379 with TLS"),
        ("redis://[::1]:7", "server ::1:7"),
        ("redis+cluster://a,b:7", "cluster a:6379,b:7"),
        ("rediss+sentinel://u:secret@a,b:1/main/2?sentinel_password=secret", "sentinel a:26379,b:1 (main) with TLS"),
        ("unix:///run/valkey.sock", "server /run/valkey.sock"),
        ("unix:///run/a@b%20%3F%c3%a4%ff.sock", "server /run/a@b ?ä\\xff.sock"),
        ("unix://user:secret@/run/valkey.sock", "server /run/valkey.sock"),
    ],
)
def test_urls(url: str, description: str) -> None:
    assert RedisClient(url).description == description


HOST = "each host must be HOST or HOST:PORT, with a port from 1 to 65535"


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("", "must be memory, embedded, or a URL"),
        ("http://h", "http://h: must be memory, embedded, or a URL with a host that begins with one of redis://,"),
        ("redis://:secret@", "must be memory, embedded, or a URL"),
        ("redis+sentinel://h", "names no group; must be redis+sentinel://HOST[:PORT],.../GROUP[/DB]"),
        ("rediss+sentinel://h,i:7/", "names no group; must be rediss+sentinel://HOST[:PORT],.../GROUP[/DB]"),
        ("redis://secret@h:port", HOST),
        ("redis+sentinel://h:port/main?sentinel_password=secret", HOST),
        ("redis://h:0", HOST),
        ("redis+cluster://h,,i", HOST),
        ("redis://h/-1", "the database -1 must be a whole number of at least 0"),
        ("redis+sentinel://:secret@h/main/db", "the database db must be a whole number of at least 0"),
        ("redis://a,b", "several hosts need +cluster or +sentinel, and a cluster has no db"),
        ("redis+cluster://:secret@h/3", "several hosts need +cluster or +sentinel, and a cluster has no db"),
    ],
)
def test_a_bad_url_is_told_what_is_wrong_with_it(url: str, problem: str) -> None:
    """Without its password."""
    with pytest.raises(InvalidSettingError, match=re.escape(problem)) as raised:
        RedisClient(url)
    assert "secret" not in str(raised.value)


async def test_tls(tmp_path: Path) -> None:
    with Valkey() as server:
        certificate = make_certificate(tmp_path)
        async with Proxy(server.port, certificate) as proxy:
            url = f"rediss://127.0.0.1:{proxy.port}"
            async with replicas(2, url, tls=RedisTls(ca=certificate[0])) as memories:
                assert await stored(memories, "t", numbers(10)) == [numbers(10)]
            for wrong in (RedisClient(url), RedisClient(proxy.url, timeout=0.5)):
                with pytest.raises(StoreUnavailableError):
                    await wrong.command("PING")
                await wrong.close()


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s")


def saved(server: EmbeddedServer) -> bool:
    """Whether it has saved what it holds, which it does every second."""
    with redis.Redis(unix_socket_path=str(server.socket), single_connection_client=True) as client:
        client.set("last", "1")
        return bool(client.execute_command("WAITAOF", 1, 0, 30_000)[0])


async def test_the_embedded_server_keeps_its_data_and_is_restarted(folder: Path) -> None:
    with EmbeddedServer(folder, 64 << 20) as server:
        await asyncio.to_thread(server.wait)
        first = server.pid
        assert first is not None
        assert (folder / "valkey.sock").stat().st_mode & 0o077 == 0
        async with replicas(2, server.url) as memories:
            await stored(memories, "t", numbers(10))
            assert await asyncio.to_thread(saved, server)
            os.kill(first, 9)
            await until(lambda: server.pid not in (None, first))
            await learn_output(memories[1], "t", numbers(11))
            assert await agreed(memories, "t") == [numbers(10), numbers(11)]
        pid = server.pid
    assert pid is not None
    assert not alive(pid)
    with EmbeddedServer(folder, 64 << 20) as server:
        await asyncio.to_thread(server.wait)
        async with replicas(1, server.url) as [memory]:
            assert await agreed([memory], "t") == [numbers(10), numbers(11)]


def test_two_services_share_one_server_and_the_second_takes_over(folder: Path) -> None:
    with ExitStack() as stack:
        with EmbeddedServer(folder, 64 << 20) as first:
            first.wait()
            second = stack.enter_context(EmbeddedServer(folder, 64 << 20))
            assert second.pid is None
        wait_for(lambda: second.pid is not None, "the second one's server")
        second.wait()


@pytest.fixture
def of_another_process(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process with an embedded server on the folder, and the server's process id."""
    code = (
        "import sys,time,pathlib;from draftwood_memory.store.embedded import EmbeddedServer\n"
        "s=EmbeddedServer(pathlib.Path(sys.argv[1]),64<<20).__enter__();s.wait();print(s.pid,flush=True);time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        while not said.strip().isdigit():  # the log is on the same stream
            assert said
            said = process.stdout.readline()
        yield process, int(said)
        process.kill()


def test_a_server_ends_with_the_process_that_started_it(of_another_process: tuple[subprocess.Popen[str], int]) -> None:
    process, server = of_another_process
    process.kill()
    wait_for(lambda: not alive(server), "the end of the server")


def test_a_server_that_a_killed_process_left_is_replaced(
    folder: Path, of_another_process: tuple[subprocess.Popen[str], int]
) -> None:
    process, orphan = of_another_process
    [guard] = psutil.Process(orphan).children()
    guard.kill()
    process.kill()
    process.wait()
    assert alive(orphan)
    with EmbeddedServer(folder, 64 << 20) as server:
        server.wait()
        assert not alive(orphan)
        assert server.pid is not None
        assert alive(server.pid)


@pytest.mark.parametrize("name", ["a@b?b=c#b%41", 'a"b', "a\\b", "a\nb", "äöü $(id)", "a\udcff"], ids=ascii)
async def test_a_folder_may_have_any_name(folder: Path, name: str) -> None:
    with EmbeddedServer(folder / name, 64 << 20) as server:
        server.wait()
        client = RedisClient(server.url)
        try:
            assert await client.command("PING")
            assert client.description.encode()
        finally:
            await client.close()
    assert not server.socket.exists()
    assert (folder / name / "appendonlydir").is_dir()


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(InvalidSettingError, match="store_folder"):
        EmbeddedServer(file, 64 << 20)
    for name in ("x" * 120, "ä" * (87 - len(os.fsencode(tmp_path)))):  # fewer characters than bytes
        with pytest.raises(InvalidSettingError, match=r"the path has \d+ bytes; a Unix socket in it allows 88"):
            EmbeddedServer(tmp_path / name, 64 << 20)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(InvalidSettingError, match="another user"):
        EmbeddedServer(tmp_path, 1 << 23)


def mode(folder: Path) -> int:
    return stat.S_IMODE(folder.stat().st_mode)


def test_its_folder_is_private_and_one_with_other_files_is_refused_rather_than_closed(tmp_path: Path) -> None:
    EmbeddedServer(tmp_path / "a" / "store", 1 << 23)
    assert mode(tmp_path / "a" / "store") == 0o700
    folder = tmp_path / "store"
    folder.mkdir()
    folder.chmod(0o755)
    (folder / "letters").touch()
    with pytest.raises(InvalidSettingError, match=r"letters.*folder of its own"):
        EmbeddedServer(folder, 1 << 23)
    assert mode(folder) == 0o755
    (folder / "letters").unlink()
    (folder / "appendonlydir").mkdir()
    EmbeddedServer(folder, 1 << 23)
    assert mode(folder) == 0o700


def test_the_server_does_not_inherit_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWOOD_STORE_KEYS", "names=secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    program, seen = tmp_path / "program", tmp_path / "environment"  # the server overwrites its own with its title
    program.write_text(f'#!/bin/sh\nenv > {seen}\nexec {binary()} "$@"\n')
    program.chmod(0o700)
    monkeypatch.setattr("draftwood_memory.store.embedded.binary", lambda: program)
    with EmbeddedServer(tmp_path / "store", 1 << 23) as server:
        server.wait()
    assert "PATH=" in seen.read_text()
    assert "secret" not in seen.read_text()
