"""A server whose user a cluster chose: one without a name, of group 0, that may write to three folders alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from draftwood_benchmarks.harness.servers import wait_for_address
from draftwood_client import Client

USER = 1_000_650_000
"""As OpenShift chooses them."""


def written(folder: Path, after: Path) -> set[Path]:
    """Files of that user, newer than `after`, in a folder or below it, which others may remove meanwhile."""
    command = ["find", str(folder), "-xdev", "-uid", str(USER), "-type", "f", "-newer", str(after)]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    return {Path(line) for line in listed.stdout.splitlines()}


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="needs root and setpriv, to become another user",
)
@pytest.mark.timeout(300)
def test_a_server_of_any_user_answers_and_writes_where_the_documentation_says(tmp_path: Path) -> None:
    """docs/image.md: /tmp, the cache and the store's folder. Nothing else could be written to."""
    for one in (tmp_path, *tmp_path.parents):
        if Path(tempfile.gettempdir()) in one.parents:
            one.chmod(0o755)
    folders = {name: tmp_path / name for name in ("cache", "store", "tmp")}
    for folder in folders.values():
        folder.mkdir()
        os.chown(folder, 10001, 0)
        folder.chmod(0o770)
    ready, log, begun = folders["tmp"] / "address", tmp_path / "log", tmp_path / "begun"
    begun.touch()
    environment = {
        **os.environ,
        "HOME": str(folders["cache"]),
        "USER": "draftwood",
        "XDG_CACHE_HOME": str(folders["cache"]),
        "NUMBA_CACHE_DIR": str(folders["tmp"] / "draftwood-compiled"),
        "TMPDIR": str(folders["tmp"]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    flags = ["--port", "0", "--ready-file", str(ready), "--threads", "1", "--metrics-port", "0"]
    flags += ["--store", "embedded", "--store-folder", str(folders["store"] / "valkey")]
    # Reading is allowed everywhere, since the interpreter of a test may be in root's folders.
    command = ["setpriv", "--reuid", str(USER), "--regid", "0", "--clear-groups"]
    command += ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    command += [sys.executable, "-m", "draftwood_service", *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=tmp_path)
    try:
        with Client(wait_for_address(process, ready, log, 400.0), timeout=60) as client:
            assert client.generate("where is my order?", max_tokens=8).text
        elsewhere = {path for place in ("/tmp", "/dev/shm", "/var/tmp") for path in written(Path(place), begun)}
    finally:
        process.terminate()
        assert process.wait(60) == 0, log.read_text()
    used = {name for name, folder in folders.items() if written(folder, begun)}
    assert {"cache", "store"} <= used
    assert not [path for path in elsewhere if tmp_path not in path.parents and path.parent != Path("/dev/shm")]
