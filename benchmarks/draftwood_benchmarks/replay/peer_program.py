"""Runs a program over recordings in the environment of a peer."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftwood_benchmarks import peers
from draftwood_benchmarks.peers.process import ENVIRONMENTS, PeerError
from draftwood_benchmarks.replay.trace import Recording

_TIMEOUT = 3600.0


def installed(peer: str) -> bool:
    """Whether `make peers` has installed it."""
    return _python(peer).exists()


def answer_of(peer: str, module: str, request: dict[str, Any], recordings: Sequence[Recording]) -> Any:
    """What the module of `peers`, run by the peer's Python, prints. Raises PeerError if it fails."""
    rows = [[prompt.tolist(), output.tolist()] for prompt, output in recordings]
    done = subprocess.run(
        [str(_python(peer)), "-W", "ignore", str(Path(peers.__file__).with_name(f"{module}.py"))],
        input=json.dumps({**request, "recordings": rows}),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
        check=False,
    )
    if done.returncode:
        raise PeerError(f"{module} failed: {' '.join(done.stderr.strip().splitlines()[-1:])}")
    return json.loads(done.stdout)


def _python(peer: str) -> Path:
    return ENVIRONMENTS / peer / "bin" / "python"
