"""How a service is started on each engine, for benchmarks."""

from __future__ import annotations

import sys
from typing import Any, Literal

from draftwood_benchmarks.harness.models import ChosenModel
from draftwood_benchmarks.harness.report import BenchmarkError
from draftwood_benchmarks.peers.process import ENVIRONMENTS

EngineName = Literal["draftwood", "vllm"]


def server_on(engine: EngineName, chosen: ChosenModel, *, eager: bool = False) -> tuple[list[str], dict[str, Any]]:
    """Flags of `draftwood serve` for a model, and further arguments of `server_process`.

    Args:
        eager: vLLM does not compile the model, which takes a minute: where its speed is not what is measured.

    Raises:
        BenchmarkError: vLLM is not installed.
    """
    if engine == "draftwood":
        return chosen.server_flags, {"python": sys.executable, "environment": {}}
    python = ENVIRONMENTS / "vllm" / "bin" / "python"
    if not python.exists():
        raise BenchmarkError(f"{python} is missing; run `make peers` in the repository")
    flags = ["--engine", "vllm", "--model", chosen.path, "--dtype", chosen.options.dtype]
    flags += ["--engine-args", '{"enforce_eager": true}'] if eager else []
    environment = {}
    if chosen.options.threads is not None:
        # Bound to cores, several replicas on one machine would share some and leave others.
        environment = {"OMP_NUM_THREADS": str(chosen.options.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return flags, {"python": str(python), "environment": environment}
