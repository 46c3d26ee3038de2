"""What a reader does with a page: its blocks from the first to the last, in a folder of its own, against a service."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from threading import Timer
from typing import Any, Self

import yaml

from draftwood_benchmarks.harness.servers import log_tail, wait_for_address
from draftwood_client import MemoryClient, MemoryRecord
from tests.certificates import make_certificate
from tests.docs.pages import ROOT, Block
from tests.helm.chart import render
from tests.memory.servers import Valkey
from tests.service.test_commands import SERVE_FAKE

SECONDS = 60
"""Of any command."""
WATCHES = re.compile(r"draftwood (top --json\b|experiment report .* --watch)")
"""Commands that go on until Ctrl-C."""
_REDIS = re.compile(r"redis://[\w.]+:6379")
_HUB_ID = re.compile(r"--model ([\w-]+/[\w.-]+)(?= |$)")
_BINARIES = Path(sys.executable).parent
_LINKED = (".venv", "benchmarks", "examples")
_QUESTIONS = "".join(f'{{"text": "Where is parcel {i}? It should be here by now."}}\n' for i in range(8))
_TRACE = '{"prompt_ids": [1, 2], "output_ids": [5, 6, 7, 8, 5, 6, 7, 8]}\n' * 3


class Session:
    """One page.

    Args:
        folder: empty; commands run in it.
        service: "host:port" of the service that the page's addresses mean; its tenant acme gets a memory.
    """

    def __init__(self, folder: Path, service: str) -> None:
        self.folder = folder
        self.addresses = {f"127.0.0.1:{port}": service for port in (50051, 50052, 50061)}
        self.addresses |= {f"10.0.0.{host}:50051": service for host in (7, 8)}
        self._stack = ExitStack()
        site = folder / "site"
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("DRAFTWOOD_")} | {
            "DRAFTWOOD_TARGET": service,
            "EDITOR": "true",
            "HF_HUB_CACHE": str(self.folder / "hub"),
            "PATH": f"{_BINARIES}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(site), str(ROOT), *sys.path]),
            "XDG_DATA_HOME": str(folder / "data"),
        }
        for name in _LINKED:
            (folder / name).symlink_to(ROOT / name)
        for name in ("answers.jsonl", "docs.txt"):
            (folder / name).write_text(_QUESTIONS, encoding="utf-8")
        (folder / "tenants.yaml").write_text("tenants:\n- {name: tenants/acme, weight: 2}\n", encoding="utf-8")
        for name in ("code-llama3-8b-instruct.jsonl", "gsm8k-tora-a.jsonl", "trace.jsonl"):
            (folder / name).write_text(_TRACE, encoding="utf-8")
        certificate, key = make_certificate(folder)
        certificate.rename(folder / "server.pem")
        key.rename(folder / "server.key")
        for example in ("phrase_book", "recall"):
            install(ROOT / "examples" / example, site)
        with MemoryClient(service) as memories:
            answers = [MemoryRecord((5, 6, 7, 8) * 4, "", "output")]
            memories.import_records(answers, fingerprint=memories.statistics().fingerprint, tenant="acme")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def write_files(self, blocks: list[Block]) -> None:
        """The files that YAML blocks show: the first one of each kind."""
        written: set[str] = set()
        for block in blocks:
            if block.language == "yaml":
                content = yaml.safe_load(block.text)
                name = "auth.yaml" if {"keys", "certificates"} & content.keys() else "tenants.yaml"
                if name not in written:
                    (self.folder / name).write_text(block.text, encoding="utf-8")
                    (self.folder / name).chmod(0o600)
                    written.add(name)

    def run(self, command: str) -> None:
        """Raises AssertionError, or ServerError of a service that does not start, with the output."""
        command = self._addressed(command.removesuffix(" &"))
        words = shlex.split(command)
        if words[:2] == ["draftwood", "serve"] and "--check" in words:
            self._bash(f"{command} --port 0")
        elif "draftwood serve" in command:
            self._serve(command)
        elif words[:2] == ["draftwood", "gateway"]:
            self._open_gateway(words)
        elif words[:2] == ["helm", "install"]:
            render(values_of(words))
        elif WATCHES.match(command):
            self._watch(command)
        else:
            self._bash(f"make --dry-run --directory {ROOT} {words[1]}" if words[0] == "make" else command)

    def run_python(self, code: str) -> None:
        self._check(["python", "-W", "error", "-c", self._addressed(code)])

    def _addressed(self, text: str) -> str:
        for written, real in self.addresses.items():
            text = text.replace(written, real)
        return text

    def _bash(self, command: str) -> None:
        self._check(["bash", "-o", "pipefail", "-c", command])

    def _check(self, words: list[str]) -> None:
        done = subprocess.run(
            words,
            cwd=self.folder,
            env=self.environment,
            input="y\n",
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{words[-1]}\n{done.stdout}{done.stderr}"

    def _watch(self, command: str) -> None:
        process = self._started(command)
        written(process, "\n")
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=SECONDS)
        assert b"Traceback" not in output, output.decode()

    def _serve(self, command: str) -> None:
        """Starts what the command says, with a model that follows a script, and ends it."""
        before, _, arguments = _REDIS.sub(lambda _: self._redis(), command).partition("draftwood serve")
        for model in _HUB_ID.findall(arguments):
            self._download(model)
        ready = self.folder / "ready"
        ready.unlink(missing_ok=True)
        ports = ["--port", "0", "--ready-file", str(ready)]
        if "--metrics-port" in arguments:
            ports += ["--metrics-port", "0"]
        log = self.folder / "serve.log"
        process = self._started(f'{before} exec python -c "$SERVE" {arguments} {shlex.join(ports)} > {log} 2>&1')
        try:
            wait_for_address(process, ready, log, SECONDS)
        finally:
            process.terminate()
            process.communicate(timeout=SECONDS)
        assert process.returncode == 0, f"{command}\n{log_tail(log)}"

    def _download(self, model: str) -> None:
        """What is looked for of a model of the hub, which is not to be asked."""
        snapshot = self.folder / "hub" / f"models--{model.replace('/', '--')}" / "snapshots" / "first"
        snapshot.mkdir(parents=True, exist_ok=True)
        (snapshot / "config.json").touch()

    def _redis(self) -> str:
        """The address of a server that stands for the reader's: a service that cannot read its store is not ready."""
        return self._stack.enter_context(Valkey()).url

    def _open_gateway(self, words: list[str]) -> None:
        """Starts a gateway on a free port, of which its log tells, for the commands that follow."""
        at = words.index("--port") + 1
        process = self._started(shlex.join(["exec", *words[:at], "0", *words[at + 1 :]]))
        self._stack.callback(process.communicate, timeout=SECONDS)
        self._stack.callback(process.terminate)
        self.addresses[f"127.0.0.1:{words[at]}"] = written(process, r"running on http://(\S+)")[1]

    def _started(self, command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment | {"SERVE": SERVE_FAKE},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def written(process: subprocess.Popen[bytes], pattern: str) -> re.Match[str]:
    """What the process writes that matches; waits for it."""
    assert process.stdout is not None
    output, late = "", Timer(SECONDS, process.kill)
    late.start()
    try:
        while (found := re.search(pattern, output)) is None:
            line = process.stdout.readline().decode()
            assert line, f"{process.args!r} ended or wrote no {pattern!r}\n{output}"
            output += line
    finally:
        late.cancel()
    return found


def install(project: Path, site: Path) -> None:
    """What `pip install` leaves of a package without dependencies: its modules, and its entry points."""
    about = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = site / f"{about['name'].replace('-', '_')}-{about['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n")
    groups = (
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in ones.items())
        for group, ones in about["entry-points"].items()
    )
    (info / "entry_points.txt").write_text("\n".join(groups), encoding="utf-8")
    for path in project.iterdir():
        if (path / "__init__.py").exists() or (path.suffix == ".py" and not path.name.startswith("test_")):
            (site / path.name).symlink_to(path)


def values_of(words: list[str]) -> dict[str, Any]:
    """The values that `--set` gives."""
    values: dict[str, Any] = {}
    for flag, given in pairwise(words):
        if flag == "--set":
            name, _, value = given.partition("=")
            *path, last = name.split(".")
            at = values
            for part in path:
                at = at.setdefault(part, {})
            at[last] = yaml.safe_load(value)
    return values
