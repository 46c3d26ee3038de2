"""Metrics of engines in the `/metrics` of their server, in real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from draftwood_memory.engines import metrics

ENGINE = """
import os, sys
from pathlib import Path
from draftwood_memory.engines.draft_metrics import DRAFT_METRICS, MEMORY_METRICS, STORE_UP
from draftwood_memory.engines.metrics import MetricFiles, folder_of
files, up = MetricFiles(folder_of(os.environ)), float(sys.argv[1])
for value in (1.0, 5.0):
    files.write([(DRAFT_METRICS[0], {"draftwood_strategy": "trie", "draftwood_arm": ""}, value),
                 (MEMORY_METRICS[0], {}, value), (MEMORY_METRICS[7], {}, value), (STORE_UP, {}, up)])
print("written", flush=True)
sys.stdin.readline()
files.close()
print("closed", flush=True)
sys.stdin.readline()
"""
SERVER = """
import os, subprocess, sys
from prometheus_client import REGISTRY, generate_latest
from draftwood_memory.engines.metrics import show_metrics
show_metrics()
show_metrics()
engines = []
for line in sys.stdin:
    operation, *more = line.split()
    if operation == "start":
        command = [sys.executable, "-c", open(more[0]).read(), *more[1:]]
        engines.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stdout))
    elif operation == "kill":
        engines[int(more[0])].kill()
        os.waitid(os.P_PID, engines[int(more[0])].pid, os.WEXITED | os.WNOWAIT)  # dead, and still in the list
        print("killed", flush=True)
    elif operation == "scrape":
        print(generate_latest(REGISTRY).decode() + "end", flush=True)
for engine in engines:
    engine.kill()
    engine.wait()
"""
SHOWN = {
    "draftwood_sequences_total": 10.0,
    "draftwood_memory_memories": 10.0,
    "draftwood_store_lag_seconds": 5.0,
    "draftwood_store_up": 0.0,
}


@contextmanager
def process(*command: str, environ: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    ) as made:
        try:
            yield made
            assert made.stdin is not None
            made.stdin.close()
            made.wait(20)  # it ends by itself
        finally:
            made.kill()


@contextmanager
def running_server(folder: Path, environ: dict[str, str]) -> Iterator[Server]:
    engine = folder / "engine.py"
    engine.write_text(ENGINE)
    with process(SERVER, environ=environ) as made:
        yield Server(made, engine)


class Server:
    """A process that shows metrics, and starts engines."""

    def __init__(self, process: subprocess.Popen[str], engine: Path) -> None:
        self.process = process
        self._engine = engine

    def ask(self, line: str, until: str) -> list[str]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        found: list[str] = []
        while (text := self.process.stdout.readline().strip()) != until:
            assert text or self.process.poll() is None
            found.append(text)
        return found

    def start(self, up: bool) -> None:
        self.ask(f"start {self._engine} {up:d}", "written")

    def scrape(self) -> dict[str, float]:
        return parsed("\n".join(self.ask("scrape", "end")))


def parsed(text: str) -> dict[str, float]:
    families = text_string_to_metric_families(text)
    return {
        sample.name: sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith("draftwood")
    }


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in (metrics._OWN, metrics._SHARED)}
    return {**kept, "TMPDIR": str(tmp_path)}


def test_a_server_shows_its_engines_once_and_no_dead_one(tmp_path: Path, environ: dict[str, str]) -> None:
    with running_server(tmp_path, environ) as server:
        assert server.scrape() == {}
        server.start(up=True)
        server.start(up=False)
        assert server.scrape() == server.scrape() == SHOWN
        server.ask("kill 1", "killed")
        assert server.scrape() == {**dict.fromkeys(SHOWN, 5.0), "draftwood_store_up": 1.0}
        [folder] = tmp_path.glob("draftwood-metrics-*")
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


def test_a_server_shows_no_other_servers_engines(tmp_path: Path, environ: dict[str, str]) -> None:
    """Two servers that one process started, and so with one folder."""
    environ[metrics._OWN] = str(tmp_path / "inherited")
    with running_server(tmp_path, environ) as first, running_server(tmp_path, environ) as second:
        first.start(up=True)
        assert first.scrape()["draftwood_store_up"] == 1.0
        assert second.scrape() == {}


def test_servers_in_multiprocess_mode_read_the_files_themselves(tmp_path: Path, environ: dict[str, str]) -> None:
    environ[metrics._SHARED] = str(tmp_path)
    with process("", environ=environ) as ended:
        stale = tmp_path / f"gauge_livesum_draftwood-{ended.pid}.db"
    stale.touch()

    def scrape() -> dict[str, float]:
        registry = CollectorRegistry()
        MultiProcessCollector(registry, str(tmp_path))  # type: ignore[no-untyped-call]
        return parsed(generate_latest(registry).decode())

    with process(ENGINE, "1", environ=environ) as first:
        with process(ENGINE, "0", environ=environ) as second:
            for one in (first, second):
                assert one.stdout is not None
                assert one.stdout.readline() == "written\n"
            assert scrape() == scrape() == SHOWN
            assert not stale.exists()
        counted = {"draftwood_sequences_total": 10.0}  # what it counted was done
        assert scrape() == {**dict.fromkeys(SHOWN, 5.0), "draftwood_store_up": 1.0, **counted}


def test_files_that_cannot_be_read_break_no_scrape(tmp_path: Path, environ: dict[str, str]) -> None:
    with running_server(tmp_path, environ) as server:
        server.start(up=True)
        [counters] = tmp_path.glob("draftwood-metrics-*/counter_*")
        counters.write_bytes(b"\xff")
        assert server.scrape() == {}


def test_it_imports_little_and_does_nothing_without_prometheus_client(environ: dict[str, str]) -> None:
    program = (
        "import sys; sys.modules['prometheus_client'] = None; before = set(sys.modules)\n"
        "from draftwood_memory.engines.metrics import show_metrics; show_metrics(); import os\n"
        f"assert {metrics._OWN!r} not in os.environ\n"
        "print({one.partition('.')[0] for one in set(sys.modules) - before} - set(sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "{'draftwood_memory'}\n"
