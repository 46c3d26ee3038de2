"""The chains of vLLM's suffix decoding over the same recordings, computed in vLLM's environment."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftwood_benchmarks import peers
from draftwood_benchmarks.peers.process import ENVIRONMENTS, PeerError
from draftwood_benchmarks.replay.trace import Recording

PROGRAM = Path(peers.__file__).with_name("suffix_replay.py")
_TIMEOUT = 3600.0


@dataclass(frozen=True, slots=True)
class SuffixChains:
    """What `peers/suffix_replay.py` counts over a trace; times in microseconds.

    Attributes:
        longest: tokens of a chain, at most.
        steps, tokens, drafted, draft_us, learn_us_per_token: as in `replay.Replayed`.
    """

    longest: int
    steps: int
    tokens: int
    drafted: int
    draft_us: float
    learn_us_per_token: float


def suffix_chains(traces: Mapping[str, Sequence[Recording]], longest: int) -> dict[str, SuffixChains]:
    """By trace; empty if it is not installed. Raises PeerError if it fails."""
    python = ENVIRONMENTS / "vllm" / "bin" / "python"
    if not python.exists():
        return {}
    found = {}
    for name, recordings in traces.items():
        rows = [[prompt.tolist(), output.tolist()] for prompt, output in recordings]
        done = subprocess.run(
            [str(python), str(PROGRAM)],
            input=json.dumps({"longest": longest, "recordings": rows}),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
        if done.returncode:
            raise PeerError(f"suffix decoding failed: {done.stderr.strip().splitlines()[-1:]}")
        found[name] = SuffixChains(longest=longest, **json.loads(done.stdout))
    return found
